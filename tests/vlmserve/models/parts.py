"""Parts of a model, each in a thread of its own, that compute together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.rank_threads import at_all
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.communicator import Communicator

T = TypeVar("T")


def in_parts(
    size: int, load: Callable[[Communicator], VisionLanguageModel], compute: Callable[[VisionLanguageModel], T]
) -> tuple[T, list[VisionLanguageModel]]:
    """What the first part computes together with all others, and all parts."""

    def work(comm: Communicator) -> tuple[T, VisionLanguageModel]:
        model = load(comm)
        return compute(model), model

    done = at_all(size, work)
    return done[0][0], [model for _, model in done]
