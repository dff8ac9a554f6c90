"""`vlmserve bench serve --url` and `bench peers`: load on servers that run already, one or several in turns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.vlmserve.api.fake_engine import MODEL, Served, real_server
from tests.vlmserve.commands.served import fake_server
from vlmserve import cli
from vlmserve.commands.bench import peers, serve
from vlmserve.commands.bench.load import Answered, EngineWork, LoadClient, Round
from vlmserve.commands.bench.media import WORKLOADS, Workload, make_workload
from vlmserve.commands.client.chat_client import ServerError
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer

FLAGS = ["bench", "serve", "--image-size", "28", "--output-tokens", "5"]


@pytest.fixture
def served(checkpoint: Path) -> Iterator[tuple[Served, str]]:
    with fake_server(checkpoint, api_key="sesame") as server:
        yield server


def test_rounds_of_requests_at_a_time(served, tmp_path, capsys, monkeypatch):
    served, url = served
    monkeypatch.setenv("VLMSERVE_API_KEY", "sesame")
    file = tmp_path / "figures.json"
    words = [*FLAGS, "--url", f"{url}/v1", "--concurrency", "1", "3", "--requests", "4", "--images", "2"]
    assert cli.main([*words, "--json", str(file)]) == 0
    sent = served.scheduler.requests
    assert len(sent) == 1 + 2 * 4  # one to begin with
    prompts = {request.input_ids.tobytes() for request in sent}
    pictures = {item.digest for request in sent for item in request.mm_inputs.items}
    assert len(prompts) == len(sent)
    assert len(pictures) == 2 * len(sent)  # none is in a cache of the server's
    figures = json.loads(file.read_text())
    assert "sesame" not in file.read_text()
    assert [one["round"] for one in figures["rounds"]] == ["1 at a time", "3 at a time"]
    for one in figures["rounds"]:
        assert (one["requests"], one["failed"]) == (4, 0)
        assert one["output_tokens_per_s"] * one["seconds"] == pytest.approx(4 * 5)
        assert one["pictures_per_s"] * one["seconds"] == pytest.approx(8)
        assert one["prompt_tokens_per_s"] > 0
        for name in ("ttft_s", "tpot_s", "itl_s", "total_s"):
            assert 0 < one[name]["p50"] <= one[name]["p90"] <= one[name]["p99"]
        assert one["ttft_s"]["mean"] < one["total_s"]["mean"]
        assert one["work"] == {"batch": 0, "shares": {"encoding": 0, "prompts": 0, "decoding": 0, "neither": 1}}
    shown = capsys.readouterr().out
    assert f"{MODEL} at {url}: 4 requests a round" in shown
    assert "first token (TTFT)" in shown


def test_a_request_rate_and_failures(served, monkeypatch, capsys):
    served, url = served
    real, count = LoadClient._ask, iter(range(100))

    async def sometimes(*args: object) -> Answered:
        if next(count) % 2:
            raise ServerError("broken")
        return await real(*args)

    monkeypatch.setattr(LoadClient, "_ask", sometimes)
    words = [*FLAGS, "--base-url", url, "--api-key", "sesame", "--seed", "3"]
    assert cli.main([*words, "--request-rate", "500", "--num-prompts", "4", "--images", "0"]) == 1
    assert all(request.mm_inputs is None for request in served.scheduler.requests)
    shown = capsys.readouterr().out
    assert "500 requests a second: 2 answered, 2 failed" in shown
    assert 'failed 2 times: "broken"' in shown
    arrivals = serve.poisson_arrivals(2000, 4.0, 0)
    assert arrivals[0] == 0
    assert np.diff(arrivals).min() > 0
    assert np.diff(arrivals).mean() == pytest.approx(1 / 4, rel=0.1)


def test_what_the_engine_did_is_told_by_its_counters():
    before = {"decode_steps": 10, "decode_requests": 10, "encode_seconds": 1, "prefill_seconds": 2, "decode_seconds": 3}
    grown = {"decode_steps": 4, "decode_requests": 12, "encode_seconds": 5, "prefill_seconds": 2, "decode_seconds": 1}
    work = EngineWork.between(before, {name: before[name] + grown[name] for name in before}, 10.0)
    assert str(work) == "decode steps of 3.0 requests; encoding 50%, prompts 20%, decoding 10%, neither 20% of the time"
    assert EngineWork.between({}, {"requests": 1.0}, 10.0) is None


def test_percentiles() -> None:
    answers = tuple(
        Answered(ttft_s=n / 100, total_s=n / 100 + 1, tokens=11, text="", gaps_s=(0.1,) * 10, prompt_tokens=7)
        for n in range(1, 101)
    )
    figures = serve.round_figures(Round(answers=answers, failures=("no",), wall_s=10.0), 2)
    assert figures["ttft_s"] == pytest.approx({"mean": 0.505, "p50": 0.505, "p90": 0.901, "p99": 0.9901})
    assert figures["tpot_s"]["p99"] == pytest.approx(0.1)
    assert (figures["failed"], figures["requests_per_s"], figures["pictures_per_s"]) == (1, 10.0, 20.0)
    assert (figures["output_tokens_per_s"], figures["prompt_tokens_per_s"]) == (110.0, 70.0)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--api-key", "other"], "a valid API key is needed"),
        (["--api-key", "sesame", "--model", "x"], "there is no model 'x' here"),
    ],
)
def test_a_server_that_refuses(served, words, complaint, capsys):
    assert cli.main([*FLAGS, "--url", served[1], *words]) == 1
    assert complaint in capsys.readouterr().err


def test_no_server(capsys):
    assert cli.main([*FLAGS, "--url", "http://127.0.0.1:1"]) == 1
    assert "no answer from http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--request-rate", "2"], ["--url", "x", "--no-baseline"], ["--requests", "0"], ["--request-rate", "nan"]]
)
def test_wrong_flags(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*FLAGS, *words])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


WORK = Workload(requests=4, at_a_time=2, pictures=2, tokens_in=6, tokens_out=5)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Workload(requests=2, at_a_time=2, pictures=0, tokens_in=7, tokens_out=3)
    monkeypatch.setattr(peers, "WORKLOADS", {"repeat": WORK, "text": text})


@pytest.mark.usefixtures("few")
def test_two_servers_in_turns(checkpoint, tmp_path, capsys):
    file = tmp_path / "found.json"
    with fake_server(checkpoint) as (left, one), fake_server(checkpoint) as (right, two):
        words = ["bench", "peers", "--base-url", one, "--base-url", f"{two}/v1"]
        words += ["--workloads", "repeat,text", "--side", "56", "--tokenizer", str(checkpoint), "--json", str(file)]
        assert cli.main([*words, "--label", "left", "--label", "right", "--api-key", "sesame"]) == 0
    shown, content = capsys.readouterr().out, file.read_text()
    assert "left beside right" in shown
    assert "sesame" not in content
    found = json.loads(content)
    turns = [(run["round"], run["workload"], run["label"]) for run in found["runs"]]
    assert turns == [(n, work, label) for n in range(2) for work in ("repeat", "text") for label in ("left", "right")]
    assert found["pids"] == {"left": os.getpid(), "right": os.getpid()}
    for run in found["runs"]:
        assert (run["failed"], run["short"]) == (0, 0)
        assert run["ttft_s"] > 0
        assert run["others_cores"] >= 0
        assert ("ttft_seen_s" in run) == (run["workload"] == "repeat")
    assert set(found["summary"]) == {"repeat", "text"}
    digests = []
    for server in (left, right):
        sent = server.scheduler.requests
        assert len(sent) == 2 + 2 * (4 + 2)  # two to begin with
        assert all(request.sampling_params.ignore_eos for request in sent)
        assert [request.sampling_params.max_new_tokens for request in sent[-2:]] == [3, 3]
        digests += [{item.digest for item in request.mm_inputs.items} for request in sent if request.mm_inputs]
    # each is asked about in two questions of one round, and never again, whichever the server
    assert len(set.union(*digests)) == 2 * (1 + 2 * 2)


@pytest.mark.usefixtures("few")
def test_a_server_with_less_than_ours(capsys):
    """It refuses ignore_eos, counts no tokens, answers too short, and fails sometimes."""
    server = Meagre()
    with real_server(server) as port:
        words = ["bench", "peers", "--base-url", f"http://127.0.0.1:{port}", "--side", "28", "--rounds", "1"]
        assert cli.main([*words, "--workloads", "text"]) == 1
    shown = capsys.readouterr().out
    assert "meagre at http://127.0.0.1" in shown
    assert "A: ignore_eos is not taken" in shown
    assert "A: 1 answers ended early" in shown
    assert 'A: 1 requests failed: "out of luck"' in shown
    assert [sorted(body["stream_options"]) for body in server.bodies] == [["include_usage"]] * len(server.bodies)
    assert "logprobs" not in server.bodies[0]


class Meagre:
    """Answers three questions with two words each, and says no to the next."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        await self._answer(scope["path"], await request.body())(scope, receive, send)

    def _answer(self, path: str, content: bytes) -> Response:
        if path == "/v1/models":
            return JSONResponse({"data": [{"id": "meagre"}]})
        body = json.loads(content)
        if "ignore_eos" in body:
            return JSONResponse({"error": {"message": "what is ignore_eos?"}}, 400)
        self.bodies.append(body)
        if len(self.bodies) == 4:
            return JSONResponse({"error": "out of luck"}, 500)
        deltas: list[Any] = [{"role": "assistant"}, {"content": "two "}, {"reasoning_content": "words"}, None]
        lines = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
        return Response("".join([*lines, 'data: {"id": "x"}\n\n', "data: [DONE]\n\n"]))


def test_ratios_say_how_many_times_as_fast_the_first_is(capsys):
    runs = [
        {"workload": "text", "label": label, "failed": 0, "ttft_s": ttft, "tokens_per_s": rate, "others_cores": 0.4}
        for label, ttft, rate in (("a", 0.1, 30.0), ("b", 0.2, 10.0), ("a", 0.1, 30.0), ("b", 0.4, 20.0))
    ]
    runs.append({"workload": "text", "label": "a", "failed": 4, "failures": ["gone"]})
    runs.append({"workload": "text", "label": "b", "failed": 0, "ttft_s": 9.0, "tokens_per_s": 1.0})
    found = peers.show_peers(["a", "b"], {"text": "what"}, runs)["text"]
    assert found["ttft_s"]["ratios"]["b"] == pytest.approx({"median": 3.0, "least": 2.0, "most": 4.0})
    assert found["tokens_per_s"]["ratios"]["b"] == pytest.approx({"median": 2.25, "least": 1.5, "most": 3.0})
    assert found["tokens_per_s"]["medians"]["b"]["median"] == 10.0
    shown = capsys.readouterr().out
    assert "a: the machine was not quiet in 2 of 3 runs" in shown
    assert 'a: 4 requests failed: "gone"' in shown


def test_figures_of_a_run() -> None:
    answers = tuple(
        Answered(ttft_s=ttft, total_s=ttft + 0.4, tokens=tokens, text="", prompt_tokens=9, number=number)
        for number, (ttft, tokens) in enumerate([(1.0, 5), (3.0, 5), (0.1, 5), (0.3, 3)])
    )
    found = peers.run_figures(Round(answers=answers, failures=("no", "no"), wall_s=2.0), WORK)
    assert (found["ttft_new_s"], found["ttft_seen_s"], found["ttft_s"]) == pytest.approx((2.0, 0.2, 0.65))
    assert (found["tokens_per_s"], found["tpot_s"], found["prompt_tokens"]) == pytest.approx((9.0, 0.1, 9))
    assert (found["answered"], found["failed"], found["failures"], found["short"]) == (4, 2, ["no"], 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_questions_have_the_tokens_they_should(name, checkpoint):
    work, tokenizer = WORKLOADS[name].scaled(0.25), load_text_tokenizer(checkpoint)

    def make(salt: str) -> list[Any]:
        return make_workload(work, side=28, salt=salt, count=lambda text: len(tokenizer.encode(text)))

    questions, others = make("a"), make("b")
    assert make("a") == questions
    assert {len(tokenizer.encode(question.text)) for question in questions} == {work.tokens_in}
    assert len({question.text for question in questions + others}) == 2 * work.requests
    pictures = {picture for question in questions + others for picture in question.pictures}
    assert len(pictures) == 2 * work.pictures


@pytest.mark.parametrize(
    "words", [[], ["--base-url", "x", "--label", "a", "--label", "b"], ["--base-url", "x", "--workloads", "none"]]
)
def test_wrong_flags_of_peers(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "peers", *words])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
