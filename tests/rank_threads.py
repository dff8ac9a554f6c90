"""Ranks as threads of one process, with collectives between them: for modules that ranks share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.shard import Shard

T = TypeVar("T")
WAIT_S = 60


class Together:
    """Collectives of threads. moved: rows that each sends, by algorithms that send no more than they must."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.moved = 0.0
        self._meet = threading.Barrier(size)
        self._given: list = [None] * size

    def of(self, rank: int) -> RankThread:
        return RankThread(self, rank)

    def exchange(self, rank: int, given: object, moved: float = 0.0) -> list:
        if rank == 0:
            self.moved += moved
        self._meet.wait(WAIT_S)
        self._given[rank] = given
        self._meet.wait(WAIT_S)
        return list(self._given)

    def abort(self) -> None:
        """Nobody waits for one that has failed."""
        self._meet.abort()


class RankThread:
    def __init__(self, together: Together, rank: int) -> None:
        self._together, self._rank = together, rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        moved = 2 * (self._together.size - 1) / self._together.size * len(x)
        return x.copy_(sum(part.clone() for part in self._together.exchange(self._rank, x.clone(), moved)))

    def in_operators(self) -> None:
        return None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._together.exchange(self._rank, x.clone())[0])

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        given = self._together.exchange(self._rank, x.clone())
        return given if self._rank == 0 else []

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._together.exchange(self._rank, x.clone(), (self._together.size - 1) * len(x))
        assert len({part.shape for part in parts}) == 1, "all must exchange as much"
        return torch.cat(parts)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        size = self._together.size
        parts = self._together.exchange(self._rank, x.clone(), (size - 1) / size * len(x))
        return torch.stack(parts).sum(0).chunk(size)[self._rank]

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        assert sum(sent) == len(x)
        everybody = self._together.exchange(self._rank, x.split(list(sent)))
        parts = [parts[self._rank] for parts in everybody]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)


def at_all(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` returns at each of so many ranks, which do it at the same time."""
    together = Together(size)

    def one(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(Communicator(Shard(rank, size), together.of(rank)))
        except BaseException:
            together.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
