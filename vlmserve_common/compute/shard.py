"""Which part of a model a process has, where several share one: tensor parallelism (Megatron-LM, arXiv:1909.08053).

Products are cut two ways. By outputs (rows of the weight): each process computes its own, and nothing is exchanged. By
inputs (columns): each has the outputs of a product before, and the partial products are added up over all processes.
Where layers are spread over stages (see `compute.stage`), that goes for those of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from vlmserve_common.compute.stage import ALL_LAYERS, Stage
from vlmserve_common.compute.token_exchange import TokenExchange
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.decoder import Sums


class Collectives(Protocol):
    """What processes do together, all of them in the same order. Tensors are on the model's device."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in x's memory; x is contiguous."""
        ...

    def in_operators(self) -> Sums | None:
        """What operators add up by that compute several layers in a call; None where they cannot."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's x, in order, at the first process; nothing at others."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ...] of everybody, who all have as many rows, in order: [size * n, ...]; x is contiguous."""
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """x [size * n, ...] -> this process's n rows, in order, of the sum over all; x is contiguous."""
        ...

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows of x, of which each process gets the next `sent`, in order -> the rows that came from each, `received`
        of them, in order; x is contiguous."""
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

    @property
    def pieces(self) -> tuple[Cut, ...]:
        """Itself: see `Cuts`."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Several cuts of one stored tensor in one dimension, which are side by side in the part: a tensor that is several
    of them one below the other, each of which is cut for itself."""

    pieces: tuple[Cut, ...]

    @property
    def size(self) -> int:
        """Entries of all of them."""
        return sum(cut.size for cut in self.pieces)

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """See `Cut.whole_shape`."""
        return self.pieces[0].whole_shape(shape)


def stacked(cuts: Sequence[Cut]) -> Cuts:
    """Cuts, in dimension 0, of tensors that are stored as one, in this order."""
    whole, before, pieces = sum(cut.whole for cut in cuts), 0, []
    for cut in cuts:
        pieces.append(Cut(cut.dim, before + cut.start, cut.size, whole))
        before += cut.whole
    return Cuts(tuple(pieces))


@dataclass(frozen=True, slots=True)
class Box:
    """Of each dimension of a stored tensor [*whole], stretches (start, size), which follow each other in the part."""

    stretches: tuple[tuple[tuple[int, int], ...], ...]
    whole: tuple[int, ...]

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The stored tensor's, for that of the part."""
        assert tuple(shape) == tuple(sum(size for _, size in own) for own in self.stretches)
        return self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSharing:
    """How the processes that share a model share its experts (see `compute.expert_part`). ep_size: parties, each with
    experts of its own, which its members cut. a2a: how tokens get to their experts (see `compute.expert_exchange`).
    redundant: copies beside one of each. counted: how often each is chosen."""

    ep_size: int = 1
    a2a: Literal["auto", "none", "torch"] = "auto"
    redundant: int = 0
    counted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGroup:
    """Of processes that have the same tokens, where others of the model have others: member number `rank` of `size`.

    collectives: of its members; None where it is one. tokens: how those of all groups are exchanged; None for a
    configuration that is only looked at.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    tokens: TokenExchange | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `size`, of the layers of `stage`. collectives: how the processes that have the parts talk;
    None where it is one. group: where these have tokens of their own (see `compute.token_exchange`); None: all have the
    same. setting: what made the parts, for errors.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    experts: ExpertSharing = ExpertSharing()
    stage: Stage = ALL_LAYERS
    group: AttentionGroup | None = None
    setting: str = "--tp-size"

    @property
    def attention(self) -> Shard:
        """The part of attention that this process has: of the heads of those who have the same tokens."""
        if self.group is None:
            return self
        return Shard(self.group.rank, self.group.size, self.group.collectives, setting="--tp-size / --dp-size")

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
            raise EngineError(f"{self.setting} is {self.size}: {what} is {count}, which it does not divide")
        return count // self.size

    def cut(self, count: int, what: str, *, dim: int = 0) -> Cut:
        """This process's entries of `count`. Errors: those of `part`."""
        size = self.part(count, what)
        return Cut(dim, self.rank * size, size, count)

    def cut_heads(self, heads: int, head_dim: int, what: str) -> Cut:
        """This process's outputs of so many heads. Errors: those of `part`."""
        size = self.part(heads, what)
        return Cut(0, self.rank * size * head_dim, size * head_dim, heads * head_dim)

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

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, ...] of the tokens that this process has -> of those that it computes its part for."""
        return x if self.group is None or self.group.tokens is None else self.group.tokens.gather(x)

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, ...] of all tokens -> of those that this process has."""
        return x if self.group is None or self.group.tokens is None else self.group.tokens.own(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, ...], this process's part of a sum over all, of all tokens -> the sum, of its own tokens. In x's memory
        where all have the same tokens; x itself where this process has everything."""
        if self.group is not None and self.group.tokens is not None:
            return self.group.tokens.scatter(x)
        return x if self.collectives is None else self.collectives.all_reduce(x)


WHOLE = Shard()
