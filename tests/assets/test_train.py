"""A run goes on where it was stopped, as if it had not been; its checkpoint is one that the engine serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from PIL import Image

from assets.recipe.plan import PLAN, WARMUP, Stage, stage_at
from assets.recipe.train import Run
from vlmserve import LLM, SamplingOverrides

TINY = (
    dataclasses.replace(PLAN[0], steps=2, batch=1),
    dataclasses.replace(PLAN[1], steps=2, batch=1, budget=90, decay=0),
)


def _train(folder: Path, until: int) -> Run:
    run = Run(folder, seed=3, device="cpu", plan=TINY)
    while run.step < until:
        run.train_stage(until=until, save_every=100, workers=0)
    return run


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole", 4)
    for until in (1, 3, 4):
        parts = _train(tmp_path / "parts", until)
    assert parts.step == whole.step == 4
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, parts.network.state_dict()[name]), name
        assert torch.equal(whole.average[name], parts.average[name]), name
    with LLM(str(tmp_path / "parts" / "checkpoint"), max_total_tokens=512) as llm:
        picture = {"type": "image", "image": Image.new("RGB", (80, 80), "red")}
        answer = llm.chat([{"role": "user", "content": [picture]}], SamplingOverrides(max_new_tokens=3))
    assert answer.prompt_tokens > 25, "a small picture is enlarged to at least 25 tokens"


def test_stages_follow_each_other() -> None:
    assert [stage_at(step, TINY)[0].name for step in range(5)] == ["look", "look", "shapes", "shapes", "shapes"]
    assert stage_at(3, TINY)[1] == 2


def test_the_rate_goes_up_stays_and_falls() -> None:
    stage = Stage(name="", chances={}, steps=1000, rate=1.0, decay=100)
    assert stage.rate_at(0) == 1 / WARMUP
    assert stage.rate_at(WARMUP) == stage.rate_at(900) == 1
    assert 0 < stage.rate_at(999) < 0.02
