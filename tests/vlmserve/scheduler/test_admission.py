"""Who waits for whose prefix: tokens that several requests share are computed once, if there are many of them."""

from __future__ import annotations

import pytest

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, Rig

KNOBS = Knobs(page=1, chunk=64, prefill=256, context=300, pool=1024)


def computed(*prompts: list[int], knobs: Knobs = KNOBS, gap: int = 0) -> int:
    """Prompt tokens that are computed for all of these, which come so many turns apart."""
    rig = Rig(knobs)
    messages = [request(f"r{number}", prompt, new=2) for number, prompt in enumerate(prompts)]
    rig.play(messages, [gap] * len(messages))
    rig.check_answers(*messages)
    return rig.loop.stats().steps.prompt_tokens_computed_total


def prompt(shared: int, own: int, length: int = 60) -> list[int]:
    return [at % 40 for at in range(shared)] + [own] * (length - shared)


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize(("length", "rest"), [(60, 1), (200, 8)])
def test_one_of_several_with_a_new_common_prefix_leads(length, rest, gap):
    """Others find it but for its last token, or for a last chunk that is too short to wait for."""
    assert computed(*[prompt(length, 0, length)] * 4, gap=gap) == length + 3 * rest


@pytest.mark.parametrize(
    ("shared", "page", "together"), [(31, 1, True), (32, 1, False), (63, 64, True), (64, 64, False)]
)
def test_a_short_common_prefix_is_computed_twice(shared, page, together):
    knobs = Knobs(page=page, chunk=256, prefill=256, context=300, pool=1024)
    found = computed(prompt(shared, 41, 100), prompt(shared, 42, 100), knobs=knobs)
    assert found == (200 if together else 200 - shared)


def test_prompts_that_are_alike_behind_different_prefixes_do_not_wait():
    rig = Rig(KNOBS)
    for number in range(2):
        rig.run(request(f"cached{number}", [number] * 20, new=1))
    messages = [request(f"r{number}", [number] * 20 + [5] * 40) for number in range(2)]
    rig.worker.batches.clear()
    rig.run(*messages)
    assert len(rig.worker.batches[0].req_pool_indices) == 2
    rig.check_answers(*messages)
