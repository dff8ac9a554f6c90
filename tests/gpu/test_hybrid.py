"""Hybrid models on the device: transformers' answers on the CPU, also behind kept states, and steps that wait for
nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_answers import GREEDY, NEW, Asked, check, engine
from tests.sync_debug import nothing_waits
from tests.tiny_checkpoints import HYBRIDS, make_checkpoint
from tests.vlmserve.reference import Reference, ask, conversations, picture

LONG = "How many red circles are there on the left side of the blue square? " * 6


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """With prompts that are long enough for states to be kept."""
    folder: Path = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    reference = Reference(folder)
    asked = [*conversations()[:4], ask(LONG), ask(LONG + "Count.", picture(1, 160, 160))]
    return Asked(folder, asked, [reference.answer(messages, NEW) for messages in asked])


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 16, "page_size": 16, "mamba_track_interval": 64}])
def test_equals_transformers(hybrid, device, settings):
    with engine(hybrid.folder, device, dtype="float32", **settings) as llm:
        check(llm, hybrid)


def test_steps_wait_for_nothing(hybrid, cuda):
    with engine(hybrid.folder, cuda, dtype="float32") as llm:
        first = llm.chat_batch(hybrid.conversations, GREEDY)  # builds kernels, and fills torch's allocators
        llm.flush_cache()
        with nothing_waits():
            again = llm.chat_batch(hybrid.conversations, GREEDY)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
