"""Two processes that share a model's layers answer as one that has them all."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vlmserve.reference import conversations
from tests.vlmserve.server_process import PATIENCE_S, ServerProcess, gone
from vlmserve import LLM, SamplingOverrides
from vlmserve.commands.bench.processes import children_of
from vlmserve.config.checks import SettingsError, check_engine_args
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.encoder import encoder_devices
from vlmserve.ipc.messages import ReturnOptions
from vlmserve_common.errors import DeviceLostError, EngineError

SETTINGS = {"num_threads": 1, "chunked_prefill_size": 32, "page_size": 4, "max_total_tokens": 2048}
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=8, ignore_eos=True)
PENALTIES = SamplingOverrides(
    temperature=0.0, max_new_tokens=6, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5
)
EVERYTHING = ReturnOptions(prompt_logprobs=2, hidden_states="all")
LAYERS = 3


def folder_of(family: str, base: Path) -> Path:
    return make_checkpoint(family, base / family)


def assert_alike(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert a.top_ids == b.top_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_answers_as_alone(family: str, tmp_path: Path):
    """Pictures and texts, alone and together: chunks beside decoding, steps in flight, cached prefixes, penalties."""
    folder = folder_of(family, tmp_path)
    asked = conversations()
    answers = []
    for size in (1, 2):
        with LLM(str(folder), tp_size=size, enable_return_hidden_states=True, **SETTINGS) as llm:
            together = llm.chat_batch(asked, GREEDY, num_logprobs=2)
            again = llm.chat_batch(asked, GREEDY, num_logprobs=2)
            assert sum(one.cached_tokens for one in again) > sum(one.cached_tokens for one in together)
            penalised = llm.chat_batch(asked[:4], PENALTIES, num_logprobs=2)
            scored = llm.chat(asked[3], GREEDY, num_logprobs=2, returns=EVERYTHING)
            answers.append([*together, *again, *penalised, scored])
            stats = llm.stats()
            assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens == 2048
            assert stats.req_pool_free == stats.req_pool_total
            if size == 2:
                group = llm.engine.ranks.group
                assert group.counts["all_reduce"] == stats.forward_steps_total * (2 * LAYERS + 1)
                assert llm._runner.kv_cache.layers[0].keys.shape[1] == 1
                assert llm._runner.model.language_model._packed is not None, "layers one by one"
    assert_alike(*answers)
    alone, shared = (one[-1] for one in answers)
    assert shared.hidden_states == pytest.approx(alone.hidden_states, abs=1e-4)
    assert shared.prompt_logprobs.logprobs == pytest.approx(alone.prompt_logprobs.logprobs, abs=1e-4, nan_ok=True)
    assert (shared.prompt_logprobs.top_ids == alone.prompt_logprobs.top_ids).all()


def test_a_rank_that_is_killed_is_named_and_nobody_waits(tmp_path: Path):
    folder = folder_of("qwen2_vl", tmp_path)
    with LLM(str(folder), tp_size=2, **SETTINGS) as llm:
        llm.chat("Name a colour.", GREEDY)
        (rank,) = (pid for pid in children_of(os.getpid()) if name_of(pid) == "rank-1")
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(DeviceLostError, match="the process of rank 1 was killed by SIGKILL"):
            llm.chat("Name a colour.", GREEDY)


def test_what_cannot_be_shared_is_refused_at_once(tmp_path: Path):
    folder = folder_of("qwen2_vl", tmp_path)
    with pytest.raises(EngineError, match="--tp-size is 3: num_attention_heads is 4, which it does not divide"):
        LLM(str(folder), tp_size=3, **SETTINGS)
    with pytest.raises(SettingsError, match="--enable-hierarchical-cache does not go with --tp-size"):
        LLM(str(folder), tp_size=2, enable_hierarchical_cache=True, **SETTINGS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    base = tmp_path_factory.mktemp("server")
    server = serving(folder_of("qwen3_vl", base), base / "run")
    yield server
    server.end()


def serving(folder: Path, runtime: Path, *more: str) -> ServerProcess:
    words = [sys.executable, "-m", "vlmserve.cli", "serve", str(folder), "--port", "0", "--tensor-parallel-size", "2"]
    words += [word for name, value in SETTINGS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return ServerProcess([*words, *more], runtime, OMP_NUM_THREADS="1")


def test_a_server_of_two_ranks_answers(server: ServerProcess, tmp_path: Path):
    folder = folder_of("qwen3_vl", tmp_path)
    with LLM(str(folder), **SETTINGS) as llm:
        alone = llm.chat("Name a colour.", GREEDY)
    assert answer_of(server) == alone.text


def answer_of(server: ServerProcess) -> str | None:
    client = server.client()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Name a colour."}],
        temperature=0.0,
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].message.content


def test_a_server_whose_rank_is_killed_ends_and_says_why(server: ServerProcess):
    """In the midst of an answer: the client hears of it, and no process is left."""
    client = server.client()
    model = client.models.list().data[0].id
    everybody = children_of(server.process.pid)
    (rank,) = (pid for pid in everybody if name_of(pid) == "rank-1")
    stream = client.completions.create(
        model=model, prompt="Name", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    began = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the rank-1 process was killed by SIGKILL"):
        for _ in stream:
            pass
    assert server.wait() == 1
    assert time.monotonic() - began < 20
    assert "stopped: the rank-1 process was killed by SIGKILL" in "".join(server.log)
    deadline = time.monotonic() + PATIENCE_S  # the process that the others are forks of ends by itself
    while not all(gone(pid) for pid in everybody):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_nodes_have_a_server_together(stages: bool, tmp_path: Path):
    """The second one starts first, and has a checkpoint folder of its own. It ends after the first one."""
    folders = [folder_of("qwen2_vl", tmp_path / str(node)) for node in range(2)]
    with LLM(str(folders[0]), **SETTINGS) as llm:
        alone = llm.chat("Name a colour.", GREEDY)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        words = ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{probe.getsockname()[1]}"]
    words += ["--tp-size", "1", "--pp-size", "2"] if stages else []
    nodes = [
        serving(folders[node], tmp_path / f"run{node}", *words, "--node-rank", str(node)) for node in reversed(range(2))
    ][::-1]
    try:
        assert answer_of(nodes[0]) == alone.text
        nodes[1].await_log("ready: ranks 1 work for 127.0.0.1:")
        nodes[0].process.send_signal(signal.SIGTERM)
        assert nodes[0].wait() == 0
        assert nodes[1].wait() == 1
        assert "rank 1 of 2 lost another one" in "".join(nodes[1].log)
        assert "stopped: the rank-1 process ended with status 1" in "".join(nodes[1].log)
    finally:
        for node in nodes:
            node.end()


def test_each_rank_may_have_an_encoder_beside_it():
    def encoders(**settings) -> tuple[str, ...]:
        args = EngineArgs(model="m", mm_encoder_tp_mode="data", **settings)
        return encoder_devices(args, torch.device("cpu"))

    assert encoders(tp_size=2) == ("cpu", "cpu")
    assert encoders(tp_size=4, nnodes=2, node_rank=1) == ("cpu", "cpu")
    assert encoders(tp_size=2, encoder_dp_size=3) == ("cpu",) * 3
    assert encoders() == ()


def test_encoders_are_on_the_gpus_behind_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)

    def encoders(device: str, **settings) -> tuple[str, ...]:
        return encoder_devices(EngineArgs(model="m", **settings), torch.device(device))

    assert encoders("cuda:0", encoder_dp_size=2) == ("cuda:1", "cuda:2")
    assert encoders("cuda:1", tp_size=2, pp_size=2, encoder_dp_size=2) == ("cuda:5", "cuda:0")
    assert encoders("cuda:1", tp_size=2, mm_encoder_tp_mode="data") == ("cuda:1", "cuda:2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 3, "nnodes": 2}, "--tp-size is 3; it must be a multiple of --nnodes, which is 2"),
        ({"nnodes": 2, "node_rank": 2, "tp_size": 2}, "--node-rank is 2; it must be below --nnodes, which is 2"),
        ({"nnodes": 2, "tp_size": 2}, "--dist-init-addr is None; it must be HOST:PORT of machine 0"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "here"}, "--dist-init-addr is 'here'; it must be HOST:PORT"),
        ({"tp_size": 0}, "--tp-size is 0; it must be 1 or more"),
        ({"nnodes": 0}, "--nnodes is 0; it must be 1 or more"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict, message: str):
    with pytest.raises(SettingsError, match=message):
        check_engine_args(EngineArgs(model="m", **settings))


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
