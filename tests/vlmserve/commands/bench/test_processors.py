"""The processors' benchmark runs, compares like with like, and counts what it says it counts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests import hf_env  # noqa: F401
from vlmserve import cli
from vlmserve.commands.bench import processors
from vlmserve.commands.bench.media import clip


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
def test_it_runs_beside_the_references(family, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--parts", "picture", "clip", "wait", "--family", family, "--rounds", "1", "--seconds", "10"]
    assert cli.main(["bench", "processors", *words, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("largest difference of a patch value: 0\n") == 3
    assert "by the clock, times ours" in printed
    figures = json.loads(out.read_text())
    assert len(figures["picture"]) == 4
    assert len(figures["clip"]) == len(figures["wait"]) >= 3
    assert all(timing["cpu"][0] > 0 for part in ("picture", "clip", "wait") for timing in figures[part].values())


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(processors, "_FULL_HD", (320, 200))
    monkeypatch.setattr(processors, "_HD", (160, 96))


def test_different_work_is_not_compared():
    with pytest.raises(AssertionError, match="patches differ"):
        processors._check_equal(np.zeros((2, 3)), np.full((2, 3), 0.1))
    with pytest.raises(AssertionError, match="patches differ"):
        processors._check_equal(np.zeros((2, 3)), np.zeros((2, 4)))


def test_a_clip_lasts_as_long_as_was_asked():
    from processors.video.decoding import Clip
    from processors.video.options import VideoLimits

    info = Clip(clip(64, 48, seconds=10, rate=30), VideoLimits()).info
    assert info.num_frames == 300
    assert np.allclose(np.diff(info.times), 1 / 30, atol=1e-3)
