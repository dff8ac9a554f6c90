"""`vlmserve bench serve --url`: load on a server that runs already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.vlmserve.api.fake_engine import MODEL, Served
from tests.vlmserve.commands.served import fake_server
from vlmserve import cli
from vlmserve.commands.bench import serve
from vlmserve.commands.bench.load import Answered, LoadClient, Round
from vlmserve.commands.client.chat_client import ServerError

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
