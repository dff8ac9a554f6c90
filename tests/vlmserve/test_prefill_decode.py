"""A prefill server and a decode server: answers as of one, whatever happens to either of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.server_process import SAMPLES, ServerProcess, await_that, data_url, serve
from vlmserve import LLM, SamplingOverrides

SMALL = ("--dtype", "float32", "--page-size", "4", "--chunked-prefill-size", "32")
PICTURE = {"type": "image_url", "image_url": {"url": data_url(SAMPLES / "red-circle.png")}}
QUESTIONS = ("What is this?", "Name a colour, and say why it is the best one of all of them.", "How many are there?")


class Pair:
    """prefill, decode: servers. expected: the answers of one engine to each question about the picture."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder, self.runtime = folder, runtime
        self.prefill = self.start_prefill()
        self.decode = self.start_decode()
        with LLM(str(folder), num_threads=1, dtype="float32") as llm:
            asked = [[{"role": "user", "content": [PICTURE, {"type": "text", "text": text}]}] for text in QUESTIONS]
            how = SamplingOverrides(temperature=0.0, max_new_tokens=12, ignore_eos=True)
            self.expected = [llm.chat(one, how).text for one in asked]

    def start_prefill(self, *more: str) -> ServerProcess:
        words = ("--role", "prefill", "--prefill-listen", "127.0.0.1:0")
        return serve(self.runtime / "prefill", *SMALL, *words, *more, model=self.folder)

    def start_decode(self, *more: str) -> ServerProcess:
        words = ("--role", "decode", "--prefill-urls", self.url, "--prefill-peer-timeout-s", "1.5")
        return serve(self.runtime / "decode", *SMALL, *words, *more, model=self.folder)

    @property
    def url(self) -> str:
        return json.loads(self.prefill.get("server_info")[1])["urls"][0]

    def meet(self) -> None:
        self.decode.await_log(f"prefill server {self.url} takes orders")

    def ask(self, number: int = 0, *, salt: str = "", **more: Any) -> Any:
        """Ask a question about the picture. salt: with another one, nothing of its prompt is cached."""
        extra = {"ignore_eos": True, **({"cache_salt": salt} if salt else {})}
        return self.decode.client().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [PICTURE, {"type": "text", "text": QUESTIONS[number]}]}],
            temperature=0,
            max_tokens=12,
            extra_body=extra,
            **more,
        )

    def text(self, number: int = 0, *, salt: str = "") -> str:
        return self.ask(number, salt=salt).choices[0].message.content


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    base = tmp_path_factory.mktemp("pair")
    found = Pair(make_checkpoint("qwen3_vl", base / "model"), base)
    found.meet()
    yield found
    for server in (found.decode, found.prefill):
        os.kill(server.process.pid, signal.SIGINT)
        assert server.wait() == 0, server.log


def test_answers_are_those_of_one_server(pair):
    before = pair.decode.figures()
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(pair.text, [0, 1, 2] * 2))
    assert found == pair.expected * 2
    streamed = [event.choices[0].delta.content or "" for event in pair.ask(1, stream=True) if event.choices]
    assert "".join(streamed) == pair.expected[1]
    both = pair.ask(2, salt="n", n=2, logprobs=True)
    assert [one.message.content for one in both.choices] == [pair.expected[2]] * 2
    assert both.usage.prompt_tokens_details.cached_tokens < both.usage.prompt_tokens
    after = pair.decode.figures()
    assert after["remote_prompts_total"] - before["remote_prompts_total"] >= 4
    computed = after["prompt_tokens_computed_total"] - before["prompt_tokens_computed_total"]
    assert computed == 9, "the last token of each prompt, and nothing else"
    assert after["temporal_patches_encoded_total"] == 0


def test_forms_and_errors_are_as_on_one_server(pair):
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    answer = pair.decode.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "A colour?"}], response_format=form, max_tokens=40
    )
    assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "blue")
    scores = pair.decode.client().completions.create(
        model="tiny", prompt="A long prompt of some words", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    assert scores.choices[0].prompt_logprobs[1], "computed here, since they are of the prompt"
    with pytest.raises(openai.BadRequestError, match="--role prefill"):
        pair.prefill.client().completions.create(model="tiny", prompt="Hello")


def test_a_client_that_leaves_leaves_nothing(pair):
    pair.prefill.post("pause_generation")
    with pytest.raises(openai.APITimeoutError):
        pair.ask(salt="leaves", timeout=0.5)
    pair.prefill.post("continue_generation")
    assert pair.text(salt="stays") == pair.expected[0]
    await_that(lambda: pair.prefill.figures()["num_prefill_inflight_queue_reqs"] == 0)
    for server in (pair.prefill, pair.decode):
        stats = json.loads(server.get("server_info")[1])["scheduler"]
        assert stats["kv_free_tokens"] + stats["kv_cached_tokens"] == stats["kv_total_tokens"]


def test_a_stopped_server_is_done_without_and_comes_back(pair):
    """It stands still in the midst of an order; the answer comes all the same."""
    pair.prefill.post("pause_generation")
    failed = pair.decode.figures()["remote_prompts_failed_total"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.text, salt="stopped")
        await_that(lambda: pair.decode.figures()["num_decode_transfer_queue_reqs"] == 1)
        scheduler = pair.prefill.children()["scheduler"]
        os.kill(scheduler, signal.SIGSTOP)
        assert answer.result() == pair.expected[0]
    assert pair.decode.figures()["remote_prompts_failed_total"] == failed + 1
    known = len("".join(pair.decode.log))
    os.kill(scheduler, signal.SIGCONT)
    # Until the API process has seen that the scheduler goes on, it answers 503.
    await_that(lambda: pair.prefill.post("continue_generation")[0] == 200)
    await_that(lambda: "takes orders" in "".join(pair.decode.log)[known:])
    assert pair.text(salt="again") == pair.expected[0]
    assert pair.decode.figures()["remote_prompts_failed_total"] == failed + 1
    await_that(lambda: pair.prefill.figures()["num_prefill_inflight_queue_reqs"] == 0)


def test_a_killed_server_is_done_without(pair, tmp_path):
    other = pair.start_prefill()
    decode = pair.start_decode("--prefill-urls", json.loads(other.get("server_info")[1])["urls"][0])
    mine = object.__new__(Pair)
    mine.__dict__ |= {**pair.__dict__, "decode": decode, "prefill": other}
    mine.meet()
    try:
        other.post("pause_generation")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(mine.text)
            await_that(lambda: decode.figures()["num_decode_transfer_queue_reqs"] == 1)
            os.killpg(other.process.pid, signal.SIGKILL)
            assert answer.result() == pair.expected[0]
        assert mine.text(1) == pair.expected[1]
    finally:
        other.end()
        decode.end()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--peer-key", "another secret of 16"), "seal is wrong: --peer-key differs"),
        (("--kv-cache-dtype", "int8"), "--kv-cache-dtype is float32 there, and int8 here"),
    ],
)
def test_a_server_that_does_not_fit_is_named_and_done_without(flags, reason, pair):
    decode = pair.start_decode(*flags)
    try:
        decode.await_log(reason)
        answer = decode.client().completions.create(model="tiny", prompt="Hello", max_tokens=2)
        assert answer.usage.completion_tokens
    finally:
        decode.end()
