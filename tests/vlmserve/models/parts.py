"""Parts of a model, each in a thread of its own, that compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.shard import Shard

T = TypeVar("T")
WAIT_S = 60


class _Together:
    """What threads exchange: everybody's tensors, in order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = x.clone()
        self._barrier.wait(WAIT_S)
        found = [given for given in self._given if given is not None]
        self._barrier.wait(WAIT_S)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class _Rank:
    """`Collectives` of one of them."""

    def __init__(self, together: _Together, rank: int) -> None:
        self._together, self._rank = together, rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._together.exchange(self._rank, x)).sum(0))

    def in_operators(self) -> None:
        return None

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        given = self._together.exchange(self._rank, x)
        return given if self._rank == 0 else []


def in_parts(
    size: int, load: Callable[[Shard], VisionLanguageModel], compute: Callable[[VisionLanguageModel], T]
) -> tuple[T, list[VisionLanguageModel]]:
    """What the first part computes together with all others, and all parts."""
    together = _Together(size)

    def run(rank: int) -> tuple[T, VisionLanguageModel]:
        try:
            model = load(Shard(rank, size, _Rank(together, rank)))
            return compute(model), model
        except BaseException:
            together.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        done = list(pool.map(run, range(size)))
    return done[0][0], [model for _, model in done]
