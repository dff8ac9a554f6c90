"""However processes share a model, and however its steps are scheduled, the answers are those of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoints import FAMILIES
from tests.vlmserve.parallel.test_tensor_parallel import GREEDY, SETTINGS, assert_alike, folder_of
from tests.vlmserve.reference import conversations
from vlmserve import LLM

# What shares a model -> its settings, and the families that can be shared so. A line each.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp 2": ({"tp_size": 2}, FAMILIES),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "steps in flight, mixed chunks": {},
    "a step at a time": {"disable_overlap_schedule": True},
    "prompts by themselves": {"enable_mixed_chunk": False, "chunked_prefill_size": 16},
    "an encoder process a rank": {"mm_encoder_tp_mode": "data"},
}
# The others are slow; with steps in flight, test_tensor_parallel.py has all families.
OFTEN = {("tp 2", "qwen3_vl", "a step at a time"), ("tp 2", "qwen3_vl", "prompts by themselves")}


def cells() -> list[Any]:
    found = []
    for layout, (_, families) in LAYOUTS.items():
        for family in families:
            for schedule in SCHEDULES:
                marks = () if (layout, family, schedule) in OFTEN else pytest.mark.slow
                found.append(pytest.param(layout, family, schedule, marks=marks))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """A family's folder, and what one process answers."""

    @cache
    def of(family: str):
        folder = folder_of(family, tmp_path_factory.mktemp("alone"))
        return folder, answers(folder)

    return of


def answers(folder: Path, **settings: Any):
    with LLM(str(folder), **(SETTINGS | settings)) as llm:
        return llm.chat_batch(conversations(), GREEDY, num_logprobs=2)


@pytest.mark.parametrize(("layout", "family", "schedule"), cells())
def test_the_answers_are_those_of_one_process(layout: str, family: str, schedule: str, alone):
    folder, expected = alone(family)
    assert_alike(expected, answers(folder, **LAYOUTS[layout][0], **SCHEDULES[schedule]))
