"""The vision benchmark runs, compares like with like, and counts what it says it counts."""

from __future__ import annotations

import json

import pytest
import torch

from tests import hf_env  # noqa: F401
from vlmserve import cli
from vlmserve.commands.bench import vision
from vlmserve.commands.bench.reference import check_rows
from vlmserve.commands.bench.vision import TowerSubject, write_checkpoint

TINY_TOWER = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "num_position_embeddings": 64}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(vision, "VISION_SIZES", vision.VISION_SIZES | TINY_TOWER)
    text = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setattr(vision, "_TEXT_SIZES", text)
    monkeypatch.setattr(vision, "_LARGE", (256, 256))


@pytest.fixture
def run(tmp_path):
    subject = TowerSubject(write_checkpoint(tmp_path, depth=4), device=torch.device("cpu"), dtype=torch.bfloat16)
    return vision.TowerRun(subject=subject, rounds=1, max_patches=512)


def test_it_runs_and_tells_what_it_measured(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--depth", "4", "--rounds", "1", "--threads", "1"]
    assert cli.main(["bench", "vision", *words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["rounds"] == 1
    assert "4 of its 24 layers" in found["checkpoint"]
    measures = found["measures"]
    assert {part: len(made) for part, made in measures.items()} == {"cold": 2, "hits": 2, "clips": 1}
    for one in (one for made in measures.values() for one in made):
        assert 0 < one["spread"]["least"] <= one["spread"]["median"] <= one["spread"]["most"]
    assert set(measures["cold"][0]["timings"]) == {"vlmserve", "packed", "one by one"}
    printed = capsys.readouterr().out
    assert printed.count("target: at ") == 5
    assert "12 of 16 temporal patches in common and found" in printed


def test_a_wrong_tower_is_not_timed(run):
    run.subject.tower.get_submodule("blocks.3.norm1").weight.neg_()
    with pytest.raises(AssertionError, match="rows differ by"):
        next(vision.measure_cold(run))


def test_one_row_that_is_off_is_seen():
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert check_rows(rows, rows.clone()) == 0
    assert 0 < check_rows(rows * 1.01, rows) < 0.02
    wrong = rows.clone()
    wrong[7] = wrong[8]
    with pytest.raises(AssertionError, match="rows differ by"):
        check_rows(wrong, rows)
    with pytest.raises(AssertionError, match="float32, not"):
        check_rows(rows.float(), rows)
    with pytest.raises(AssertionError, match=r"\[499, 64\]"):
        check_rows(rows[1:], rows)
