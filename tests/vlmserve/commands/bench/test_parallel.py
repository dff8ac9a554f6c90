"""`vlmserve bench parallel`: what two processes gain is held to what the machine gives two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmserve.commands.bench import parallel
from vlmserve.commands.bench.parallel import OTHERS, in_rounds, main

FOUND = {
    OTHERS: [0.0, 0.1],
    "reads of one": [2.0, 2.0],
    "reads of two": [1.25, 1.25],  # the machine reads 1.6 times as quickly
    "decode of one": [1.0, 1.0],
    "decode of two": [0.5, 0.8],  # twice, and 1.25 times as quick
    "products of one": [2.0, 2.0],
    "products of two": [1.0, 1.0],
    "prefill of one": [1.0, 1.0],
    "prefill of two": [1.0, 1.0],
}


def test_what_is_gained_is_part_of_what_is_possible():
    found = {one.name: one for one in parallel._gains(FOUND, "two over one", target=0.8)}
    decode, prefill = found["decode, of what is possible"], found["prefill, of what is possible"]
    assert (decode.spread.least, decode.spread.most) == pytest.approx((1.25 / 1.6, 2 / 1.6))
    assert decode.met
    assert prefill.spread.median == pytest.approx(0.5)
    assert prefill.met is False


def test_the_first_of_all_rounds_warms_up():
    turns = iter(range(6))
    found = in_rounds({"a": lambda: next(turns), "b": lambda: next(turns)}, 2)
    assert len(found.pop(OTHERS)) == 2
    assert found == {"a": [2, 4], "b": [3, 5]}


@pytest.mark.slow
def test_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(parallel.TEXT_SIZES, "vocab_size", 4096)
    file = tmp_path / "figures.json"
    work = ["--requests", "2", "--steps", "8", "--prompt", "32", "--rounds", "1", "--wait-s", "0"]
    assert main(["--parts", "tp", "pp", "--layers", "2", *work, "--json", str(file)]) == 0
    measures = json.loads(file.read_text())["measures"]
    for part, target in (("tp", 0.8), ("pp", 0.85)):
        figures = {one["name"]: one for one in measures[part]}
        for name in ("decode, of what is possible", "prefill, of what is possible"):
            assert figures[name]["target"] == target
            assert figures[name]["spread"]["least"] > 0
