"""Several replicas behind one server: answers as of one, each request at the right one, and the end of all of them."""

from __future__ import annotations

import base64
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.tiny_checkpoints import ALL_FAMILIES, HYBRIDS, make_checkpoint
from tests.vlmserve.parallel.sharing import name_of
from tests.vlmserve.server_process import PATIENCE_S, ROOT, ServerProcess, gone, serving
from vlmserve.commands.bench.processes import children_of
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import rank_processes as replicas
from vlmserve.engine.rank_processes import replica_args
from vlmserve_common.errors import EngineError

PICTURES = ("shapes.png", "receipt.png")
# answers that last until their clients leave, however fast the machine
SLOW = ("--logits-processors", "tests.vlmserve.forbidding:Slow")
ENDLESS = {"stream": True, "max_tokens": 3900, "ignore_eos": True, "logits_processors": ["slow"]}


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("dp") / "run", "--dp-size", "2", model=default_model) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def question(text: str, picture: str | None = None) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture is not None:
        encoded = base64.b64encode((ROOT / "assets" / "samples" / picture).read_bytes()).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}})
    return [{"role": "user", "content": content}]


def answer(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    ours = ("data_parallel_rank", "session_id", "ignore_eos", "logits_processors")
    extra = {name: options.pop(name) for name in ours if name in options}
    return client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        extra_body=extra,
        **{"max_tokens": 8, "temperature": 0, **options},
    )


def figures(server: ServerProcess, name: str) -> list[float]:
    """Of each replica."""
    return metric(server, f"replica_{name}")


def metric(server: ServerProcess, name: str) -> list[float]:
    families = {family.name: family for family in text_string_to_metric_families(server.get("metrics")[1])}
    return [sample.value for sample in families[f"vlmserve:{name}"].samples]


def cached(reply: Any) -> int:
    return reply.usage.prompt_tokens_details.cached_tokens


def test_a_prompt_comes_back_to_where_it_is_cached_and_others_are_spread(client, server):
    before = figures(server, "prompt_tokens")
    first = [answer(client, question("What is in this picture?", picture)) for picture in PICTURES]
    assert all(b > a for a, b in zip(before, figures(server, "prompt_tokens"), strict=True)), "one at each"
    again = [answer(client, question("What is in this picture?", picture)) for picture in PICTURES]
    other = [answer(client, question("How many shapes?", picture)) for picture in PICTURES]
    assert [cached(reply) for reply in first] == [0, 0]
    assert [(cached(reply) > reply.usage.prompt_tokens / 2) for reply in (*again, *other)] == [True] * 4
    assert [reply.choices[0].message.content for reply in again] == [
        reply.choices[0].message.content for reply in first
    ]


def test_a_request_may_choose_its_replica(client, server):
    for rank in (1, 1, 0):
        before = figures(server, "prompt_tokens")
        reply = answer(client, question("Say nothing."), data_parallel_rank=rank)
        grown = [b - a for a, b in zip(before, figures(server, "prompt_tokens"), strict=True)]
        assert grown == [reply.usage.prompt_tokens * (n == rank) for n in range(2)]
    with pytest.raises(openai.BadRequestError, match=r"data_parallel_rank is 2; it must be 0 or more and below .* 2"):
        answer(client, question("hi"), data_parallel_rank=2)
    with pytest.raises(openai.BadRequestError, match="data_parallel_rank"):
        answer(client, question("hi"), data_parallel_rank=-1)


def test_a_session_goes_on_where_it_began(client, server):
    turns = question("Remember the number 5, please, for as long as we talk.")
    answer(client, turns, session_id="s", data_parallel_rank=1)
    answer(client, question("something else, to be in between"))
    before = figures(server, "prompt_tokens_cached")
    answer(client, question("A turn that begins otherwise."), session_id="s")
    answer(client, turns, session_id="s")
    assert [b > a for a, b in zip(before, figures(server, "prompt_tokens_cached"), strict=True)] == [False, True]


def await_running(server, expected: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while figures(server, "requests_running") != expected:
        assert time.monotonic() < deadline


def aborted_in_time(client, server) -> bool:
    before = figures(server, "generation_tokens")
    streams = [
        answer(client, question("Go on and on."), stream=True, max_tokens=3000, ignore_eos=True, data_parallel_rank=n)
        for n in range(2)
    ]
    for stream in streams:
        next(iter(stream))
    streams[1].close()
    while figures(server, "requests_running")[1]:
        next(iter(streams[0]), None)  # the other one goes on
    next(iter(streams[0]), None)
    streams[0].close()
    await_running(server, [0, 0])
    grown = [b - a for a, b in zip(before, figures(server, "generation_tokens"), strict=True)]
    return all(0 < tokens < 3000 for tokens in grown)


def test_streams_are_aborted_where_they_run(client, server):
    """Engines may reach the end before this client gets its turn on a busy machine: it tries again then."""
    assert any(aborted_in_time(client, server) for _ in range(5)), "none was computed to its end"


def test_right_guesses_of_all_replicas_are_counted(client, server):
    fields = {"guided_regex": "(this|that) is the rest of the text", "return_spec_tokens_details": True}

    def right_at(rank: int) -> list[int]:
        body = {**fields, "data_parallel_rank": rank}
        reply: Any = client.chat.completions.create(model="tiny", messages=question("hi"), extra_body=body)
        return reply.usage.model_extra["spec_tokens_details"]["spec_num_correct_drafts_per_pos"]

    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(right_at, range(2)))
    assert all(sum(own) > 0 for own in places)
    both = [sum(at) for at in itertools.zip_longest(*places, fillvalue=0)]
    assert metric(server, "spec_decode_num_accepted_tokens_per_pos") == both


def test_operators_mean_all_replicas(server):
    url = f"http://127.0.0.1:{server.port()}"
    assert httpx.post(f"{url}/pause_generation").json()["paused"]
    assert httpx.post(f"{url}/pause_generation").status_code == 409
    assert not httpx.post(f"{url}/continue_generation").json()["paused"]
    assert set(httpx.post(f"{url}/flush_cache").json()) == {"flushed_tokens"}
    info = httpx.get(f"{url}/server_info").json()
    assert info["scheduler"]["kv_total_tokens"] == sum(one["kv_total_tokens"] for one in info["replicas"]) == 2 * 4096
    assert info["scheduler"]["kv_free_tokens"] == 2 * 4096, "both were flushed"
    assert httpx.post(f"{url}/v1/warmup", json={"messages": question("", PICTURES[0])}).json()["items"]


def test_a_request_does_not_wait_where_its_prompt_is_cached_while_another_replica_has_room(
    default_model: Path, tmp_path: Path
):
    """It is computed at once. Beyond what all replicas together take, and only then, there is a 429."""
    flags = ("--dp-size", "2", "--max-running-requests", "1", "--max-queued-requests", "1")
    with serving(tmp_path / "run", *flags, *SLOW, model=default_model) as server, server.client() as client:
        streams = [answer(client, question("Go on and on. " * 20), **ENDLESS) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        deadline = time.monotonic() + PATIENCE_S
        while figures(server, "requests_running") != [1, 1]:
            assert time.monotonic() < deadline
        with ThreadPoolExecutor(2) as pool:
            named = [pool.submit(answer, client, question("Hi"), data_parallel_rank=0) for _ in range(2)]
            while figures(server, "requests_waiting") != [2, 0]:
                assert time.monotonic() < deadline
            with pytest.raises(openai.RateLimitError, match=r"4 answers are waiting or running .* the limit is 4"):
                answer(client.with_options(max_retries=0), question("Hi"))  # a later try may find room
            for stream in streams:
                stream.close()
            assert all(waited.result().choices for waited in named)


@pytest.mark.slow
def test_when_a_replica_dies_the_streams_of_all_end_and_so_does_the_server(default_model: Path, tmp_path: Path):
    with serving(tmp_path / "run", "--dp-size", "2", *SLOW, model=default_model) as server:
        with server.client() as client:
            children = {name_of(pid): pid for pid in children_of(server.process.pid)}
            directories = server.directories()
            assert {"r0-scheduler", "r1-scheduler", "r0-detokenizer", "r1-detokenizer"} <= children.keys()
            streams = [answer(client, question("Go on."), data_parallel_rank=n, **ENDLESS) for n in range(2)]
            for stream in streams:
                next(iter(stream))
            os.kill(children["r1-scheduler"], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(openai.APIError, match="the scheduler process of replica 1 was killed by SIGKILL"):
                    list(stream)
        assert server.wait() == 1
        assert all(gone(pid) for pid in children.values())
        assert not any(path.exists() for path in directories)


def answers_of(server: ServerProcess) -> list[Any]:
    """Of pictures and texts, alone and together."""
    asked = [question("What is there?", picture) for picture in PICTURES] + [question("Name a colour."), question("Hi")]
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        alone = [answer(client, one, logprobs=True) for one in asked]
        together = list(pool.map(lambda one: answer(client, one, logprobs=True), asked * 2))
    return [[(token.token, token.logprob) for token in reply.choices[0].logprobs.content] for reply in alone + together]


@pytest.fixture(scope="module")
def served_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list]]:
    """A family's folder, and what a server with one replica answers."""

    @cache
    def of(family: str) -> tuple[Path, list]:
        base = tmp_path_factory.mktemp("served")
        folder = make_checkpoint(family, base / "model", mixers=("linear_attention", "full_attention") * 2)
        with serving(base / "run", model=folder) as server:
            return folder, answers_of(server)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        *((family, "") for family in (*ALL_FAMILIES, *HYBRIDS)),
        ("qwen2_vl", "--disable-overlap-schedule"),
        ("qwen3_vl", "--no-enable-mixed-chunk --chunked-prefill-size 16"),
        ("qwen2_5_vl", "--encoder-dp-size 2"),
        *((family, flags) for family in ("qwen3_vl", *HYBRIDS) for flags in ("--tp-size 2", "--pp-size 2")),
    ],
)
def test_replicas_answer_as_one(family: str, flags: str, served_alone, tmp_path: Path):
    """Also those of several ranks each, which meet in a place of their own."""
    folder, expected = served_alone(family)
    with serving(tmp_path, "--dp-size", "2", *flags.split(), model=folder) as server:
        found = answers_of(server)
        names = {name_of(pid) for pid in children_of(server.process.pid)}
    assert ({"r0-rank-1", "r1-rank-1"} <= names) == flags.startswith(("--tp-size", "--pp-size"))
    for one, other in zip(expected, found, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in other], abs=1e-4)


@pytest.mark.slow
def test_what_one_encoded_another_finds_on_disk(default_model: Path, tmp_path: Path):
    """And answers the same."""
    kept = tmp_path / "kept"
    flags = ("--dp-size", "2", "--embedding-cache-dir", str(kept))
    with serving(tmp_path / "run", *flags, model=default_model) as server:
        with server.client() as client:
            asked = question("What is in this picture?", "shapes.png")
            first = answer(client, asked, data_parallel_rank=0)
            deadline = time.monotonic() + PATIENCE_S
            while not list(kept.rglob("*.safetensors")):  # it is written beside the answer
                assert time.monotonic() < deadline
                time.sleep(0.02)
            second = answer(client, asked, data_parallel_rank=1)
        assert first.choices[0].message.content == second.choices[0].message.content
        assert all(prompt > 0 for prompt in figures(server, "prompt_tokens")), "each has computed one"
        assert metric(server, "temporal_patches_encoded") == [1]


def test_each_replica_has_its_share_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replicas, "available_cpus", lambda: 8)
    args = EngineArgs(model="m", device="cpu", dp_size=2, tp_size=2, encoder_dp_size=1, mem_fraction_static=0.8)
    own = replica_args(args, 1)
    assert (own.num_threads, own.encoder_threads, own.mem_fraction_static) == (2, 4, 0.4)
    assert replica_args(args, None) is args


def test_each_replica_has_its_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replicas, "resolve_device", torch.device)
    monkeypatch.setattr(replicas.torch.cuda, "device_count", lambda: 6)
    args = EngineArgs(model="m", device="cuda:1", dp_size=2, tp_size=2, encoder_dp_size=1)
    own = [replica_args(args, replica) for replica in range(2)]
    assert [one.device for one in own] == ["cuda:1", "cuda:3"]
    assert [one.encoder_devices for one in own] == ["cuda:5", "cuda:0"], "behind all, then from the first on"
    many = [replica_args(replace(args, encoder_dp_size=3), replica).encoder_devices for replica in range(2)]
    assert many == ["cuda:5,cuda:0,cuda:1", "cuda:3,cuda:4,cuda:3"], "then its own"
    with pytest.raises(EngineError, match=r"--dp-size is 3: so many replicas of 2 ranks each want 6 GPUs, from cuda:1"):
        replica_args(EngineArgs(model="m", device="cuda:1", dp_size=3, tp_size=2), 0)
