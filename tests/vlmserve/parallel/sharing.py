"""What tests of processes that share a model have in common: settings, servers, and when answers are alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vlmserve.server_process import ServerProcess
from vlmserve import SamplingOverrides
from vlmserve.ipc.messages import ReturnOptions

SETTINGS = {"num_threads": 1, "chunked_prefill_size": 32, "page_size": 4, "max_total_tokens": 2048}
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=8, ignore_eos=True)
PENALTIES = SamplingOverrides(
    temperature=0.0, max_new_tokens=6, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5
)
EVERYTHING = ReturnOptions(prompt_logprobs=2, hidden_states="all")
LAYERS, DENSE_LAYERS = 3, 1  # of the tiny models; and those without experts, of the ones that have some


def assert_alike(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Compare completions: tokens, their logprobs, and what else was likely."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert a.top_ids == b.top_ids


def start_server(folder: Path, runtime: Path, *more: str) -> ServerProcess:
    """Start a server of two ranks, unless `more` says otherwise."""
    words = [sys.executable, "-m", "vlmserve.cli", "serve", str(folder), "--port", "0", "--tensor-parallel-size", "2"]
    words += ["--served-model-name", "m"]
    words += [word for name, value in SETTINGS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return ServerProcess([*words, *more], runtime, OMP_NUM_THREADS="1")


def answer_of(server: ServerProcess, **more: Any) -> str | None:
    """Ask what test cases ask `LLM`. more: fields that are not OpenAI's."""
    answer = server.client().chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Name a colour."}],
        temperature=0.0,
        max_tokens=8,
        extra_body={"ignore_eos": True, **more},
    )
    return answer.choices[0].message.content


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
