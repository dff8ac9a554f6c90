"""Which part of a model a process has, where several share one: tensor parallelism (Megatron-LM, arXiv:1909.08053).

Products are cut two ways. By outputs (rows of the weight): each process computes its own, and nothing is exchanged. By
inputs (columns): each has the outputs of a product before, and the partial products are added up over all processes.
Where layers are spread over stages (see `compute.stage`), that goes for those of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vlmserve_common.compute.stage import ALL_LAYERS, Stage
from vlmserve_common.errors import EngineError


class Collectives(Protocol):
    """What processes do together, all of them in the same order. Tensors are on the model's device."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in x's memory; x is contiguous."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's x, in order, at the first process; nothing at others."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries `start` .. `start` + `size` of `whole` in one dimension of a stored tensor."""

    dim: int
    start: int
    size: int
    whole: int

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The stored tensor's, for that of the part."""
        return (*shape[: self.dim], self.whole, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `size`, of the layers of `stage`. collectives: how the processes that have the parts talk;
    None where it is one."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    stage: Stage = ALL_LAYERS

    @property
    def is_whole(self) -> bool:
        """Whether this process has all of its layers."""
        return self.size == 1

    @property
    def is_entry(self) -> bool:
        """Whether this is the process that schedules, encodes pictures, and tells the others what to do."""
        return self.rank == 0 and self.stage.is_first

    @property
    def samples(self) -> bool:
        """Whether the logits come together in this process."""
        return self.rank == 0 and self.stage.is_last

    @property
    def has_everything(self) -> bool:
        """Whether this process has the whole model."""
        return self.is_whole and self.stage.size == 1

    def part(self, count: int, what: str) -> int:
        """How many of `count` each has. EngineError if they cannot be shared evenly. what: their name, for errors."""
        if count % self.size:
            raise EngineError(f"--tp-size is {self.size}: {what} is {count}, which it does not divide")
        return count // self.size

    def cut(self, count: int, what: str, *, dim: int = 0) -> Cut:
        """This process's entries of `count`. Errors: those of `part`."""
        size = self.part(count, what)
        return Cut(dim, self.rank * size, size, count)

    def kv_heads(self, count: int) -> int:
        """How many key-value heads each has: a part, or one that several have. EngineError if neither is possible."""
        if self.size > count and self.size % count == 0:
            return 1
        return self.part(count, "num_key_value_heads")

    def cut_kv(self, heads: int, head_dim: int) -> Cut:
        """This process's outputs of a projection to so many key-value heads. Errors: those of `kv_heads`."""
        size = self.kv_heads(heads)
        first = self.rank * heads // self.size
        return Cut(0, first * head_dim, size * head_dim, heads * head_dim)

    def cut_vocab(self, count: int) -> tuple[Cut, int]:
        """This process's tokens of a vocabulary, and the rows that all have for theirs: the last may need fewer.
        EngineError for more processes than can have any."""
        rows = -(-count // self.size)
        if (self.size - 1) * rows >= count:
            raise EngineError(f"--tp-size is {self.size}: vocab_size is {count}, too few for so many")
        start = self.rank * rows
        return Cut(0, start, min(rows, count - start), count), rows

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`; x itself where this process has all."""
        return x if self.collectives is None else self.collectives.all_reduce(x)


WHOLE = Shard()
