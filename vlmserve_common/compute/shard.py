"""The geometry of a model that processes share: which part each of them has. Connections are in `communicator`.

Tensor parallelism (Megatron-LM, arXiv:1909.08053) cuts products two ways. By outputs (rows of the weight): each process
computes its own outputs, and nothing is exchanged. By inputs (columns): each process has the inputs that it computed
itself, and the partial products are added up over all processes.

Pipeline parallelism (GPipe, arXiv:1811.06965) gives each stage some of the layers. A stage sends the output of its last
layer to the next stage. Tensor parallelism then cuts the layers of one stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from vlmserve_common.errors import EngineError


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries `start` .. `start` + `size` of `whole` in one dimension of a stored tensor."""

    dim: int
    start: int
    size: int
    whole: int

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given the part's shape."""
        return (*shape[: self.dim], self.whole, *shape[self.dim + 1 :])

    @property
    def pieces(self) -> tuple[Cut, ...]:
        """A tuple of this cut alone, as `Cuts` has."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Several cuts of one stored tensor in one dimension, which lie side by side in the part. Such a tensor is several
    tensors stacked, each of which is cut by itself."""

    pieces: tuple[Cut, ...]

    @property
    def size(self) -> int:
        """Entries of all cuts together."""
        return sum(cut.size for cut in self.pieces)

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given the part's shape."""
        return self.pieces[0].whole_shape(shape)


def stacked(cuts: Sequence[Cut]) -> Cuts:
    """Join cuts, in dimension 0, of tensors that are stored as one tensor in this order."""
    whole, before, pieces = sum(cut.whole for cut in cuts), 0, []
    for cut in cuts:
        pieces.append(Cut(cut.dim, before + cut.start, cut.size, whole))
        before += cut.whole
    return Cuts(tuple(pieces))


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a stored tensor [*whole]: in each dimension, stretches (start, size) that follow each other in it."""

    stretches: tuple[tuple[tuple[int, int], ...], ...]
    whole: tuple[int, ...]

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given the part's shape."""
        assert tuple(shape) == tuple(sum(size for _, size in own) for own in self.stretches)
        return self.whole


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSharing:
    """How the processes that share a model share its experts (see `compute.expert_part`).

    ep_size: parties; each has experts of its own, which its members cut. a2a: how tokens get to their experts (see
    `compute.expert_exchange`). redundant: extra slots for copies of busy experts. counted: whether to count how often
    each expert is chosen.
    """

    ep_size: int = 1
    a2a: Literal["auto", "none", "torch"] = "auto"
    redundant: int = 0
    counted: bool = False


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Stage number `rank` of `size`: a run of the model's layers."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this stage begins with the embedding."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage ends with the final norm and the head."""
        return self.rank == self.size - 1

    def layers(self, count: int, head: float = 0.0) -> range:
        """Return which of `count` layers this stage has. Layers are spread evenly; the first stages may have one more.

        head: the work behind the last layer (norm and head), counted in layers. The last stage has fewer layers for it.
        EngineError for more stages than layers.
        """
        if count < self.size:
            raise EngineError(f"--pp-size is {self.size}: num_hidden_layers is {count}, too few for so many stages")
        fair = (count + head) / self.size - head
        last = max(1, min(count // self.size, math.ceil(fair - 0.5)))
        if self.is_last:
            return range(count - last if self.size > 1 else 0, count)
        each, more = divmod(count - last, self.size - 1)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `size` of the layers of `stage`.

    groups: attention groups, each of which has requests and tokens of its own (see `compute.token_exchange`); a rank is
    member `rank % (size // groups)` of group `rank // (size // groups)`. setting: the flag that made the parts, for
    error messages.
    """

    rank: int = 0
    size: int = 1
    _: KW_ONLY
    experts: ExpertSharing = ExpertSharing()
    stage: PipelineStage = PipelineStage()
    groups: int = 1
    setting: str = "--tp-size"

    @property
    def attention(self) -> Shard:
        """This process's part of attention: heads are cut among the ranks of one group."""
        if self.groups == 1:
            return self
        members = self.size // self.groups
        return Shard(self.rank % members, members, setting="--tp-size / --dp-size")

    @property
    def is_whole(self) -> bool:
        """Whether this process has all of its layers."""
        return self.size == 1

    @property
    def is_entry(self) -> bool:
        """Whether this process schedules, encodes pictures and gives orders."""
        return self.rank == 0 and self.stage.is_first

    @property
    def samples(self) -> bool:
        """Whether the logits are brought together in this process."""
        return self.rank == 0 and self.stage.is_last

    def part(self, count: int, what: str) -> int:
        """Return how many of `count` each process has. what: their name, for errors. EngineError if `size` does not
        divide them."""
        if count % self.size:
            raise EngineError(f"{self.setting} is {self.size}: {what} is {count}, which it does not divide")
        return count // self.size

    def cut(self, count: int, what: str, *, dim: int = 0) -> Cut:
        """Return this process's entries of `count`. Errors are those of `part`."""
        size = self.part(count, what)
        return Cut(dim, self.rank * size, size, count)

    def cut_heads(self, heads: int, head_dim: int, what: str) -> Cut:
        """Return this process's outputs of a projection to `heads` heads. Errors are those of `part`."""
        size = self.part(heads, what)
        return Cut(0, self.rank * size * head_dim, size * head_dim, heads * head_dim)

    def kv_heads(self, count: int) -> int:
        """Return how many of `count` key-value heads each process has.

        Several processes hold a copy of one head if there are more processes than heads. EngineError if neither number
        divides the other.
        """
        if self.size > count and self.size % count == 0:
            return 1
        return self.part(count, "num_key_value_heads")

    def cut_kv(self, heads: int, head_dim: int) -> Cut:
        """Return this process's outputs of a projection to `heads` key-value heads. Errors are those of `kv_heads`."""
        size = self.kv_heads(heads)
        first = self.rank * heads // self.size
        return Cut(0, first * head_dim, size * head_dim, heads * head_dim)

    def cut_vocab(self, count: int) -> tuple[Cut, int]:
        """Return this process's part of a vocabulary, and the number of rows that every process has for its part.

        The last process may use fewer rows. EngineError if some process would have no tokens.
        """
        rows = -(-count // self.size)
        if (self.size - 1) * rows >= count:
            raise EngineError(f"--tp-size is {self.size}: vocab_size is {count}, too few for so many")
        start = self.rank * rows
        return Cut(0, start, min(rows, count - start), count), rows


WHOLE = Shard()
