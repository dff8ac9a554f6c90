"""However processes share a model, and however its steps are scheduled, the answers are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoints import ALL_FAMILIES, HYBRID_MOE, HYBRIDS, MOE, make_checkpoint
from tests.vlmserve.parallel.test_data_parallel import answers_of, serve
from tests.vlmserve.parallel.test_tensor_parallel import GREEDY, SETTINGS, assert_alike
from tests.vlmserve.reference import conversations
from vlmserve import LLM

SPARSE = (MOE, HYBRID_MOE)
EVERY = (*ALL_FAMILIES, *HYBRIDS)
# What shares a model -> its settings, and the families that can be shared so. A line each.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp 2": ({"tp_size": 2}, EVERY),
    "pp 2": ({"pp_size": 2}, EVERY),
    "tp 2 x pp 2": ({"tp_size": 2, "pp_size": 2}, EVERY),
    "ep 2, sums": ({"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "none"}, SPARSE),
    "ep 2, rows": ({"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "torch"}, SPARSE),
    "groups with attention of their own": ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, EVERY),
    "ep 2 x pp 2": ({"tp_size": 2, "pp_size": 2, "ep_size": 2, "moe_a2a_backend": "torch"}, SPARSE),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "steps in flight, mixed chunks": {},
    "a step at a time": {"disable_overlap_schedule": True},
    "prompts by themselves": {"enable_mixed_chunk": False, "chunked_prefill_size": 16},
    "encoder processes": {"encoder_dp_size": 2},
}
# The others are slow. What is not here, test_tensor_parallel.py and its neighbours have, with steps in flight.
OFTEN = {
    ("tp 2", "qwen3_vl", "a step at a time"),
    ("tp 2 x pp 2", MOE, "prompts by themselves"),
    ("pp 2", HYBRID_MOE, "steps in flight, mixed chunks"),
}


def cells() -> list[Any]:
    found = []
    for layout, (_, families) in LAYOUTS.items():
        for family in families:
            for schedule in SCHEDULES:
                marks = () if (layout, family, schedule) in OFTEN else pytest.mark.slow
                found.append(pytest.param(layout, family, schedule, marks=marks))
    return found


def folder_of(family: str, base: Path) -> Path:
    """Of hybrids, with layers of both kinds in each of two stages."""
    return make_checkpoint(family, base / family, mixers=("linear_attention", "full_attention") * 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list]]:
    """A family's folder, and what one process answers."""

    @cache
    def of(family: str) -> tuple[Path, list]:
        folder = folder_of(family, tmp_path_factory.mktemp("alone"))
        return folder, answers(folder)

    return of


def answers(folder: Path, **settings: Any) -> list:
    with LLM(str(folder), **(SETTINGS | settings)) as llm:
        return llm.chat_batch(conversations(), GREEDY, num_logprobs=2)


@pytest.mark.parametrize(("layout", "family", "schedule"), cells())
def test_the_answers_are_those_of_one_process(layout: str, family: str, schedule: str, alone):
    folder, expected = alone(family)
    assert_alike(expected, answers(folder, **LAYOUTS[layout][0], **SCHEDULES[schedule]))


@pytest.fixture(scope="module")
def served_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list]]:
    """A family's folder, and what a server with one replica answers."""

    @cache
    def of(family: str) -> tuple[Path, list]:
        base = tmp_path_factory.mktemp("served")
        folder = folder_of(family, base)
        return folder, served(folder, base / "run")

    return of


def served(folder: Path, runtime: Path, **settings: Any) -> list:
    server = serve(folder, runtime, *flags(settings))
    try:
        return answers_of(server)
    finally:
        server.end()


def flags(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", EVERY)
def test_replicas_answer_as_one(family: str, schedule: str, served_alone, tmp_path: Path):
    folder, expected = served_alone(family)
    for one, other in zip(expected, served(folder, tmp_path, dp_size=2, **SCHEDULES[schedule]), strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in other], abs=1e-4)
