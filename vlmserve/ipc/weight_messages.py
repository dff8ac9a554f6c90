"""Orders to change the weights of a running engine, or to give its memory back for a while. The first rank of a model
passes them on to all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vlmserve_common.checkpoint.weight_source import WeightSource

MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckWeightsReq:
    """Find out whether weights fit, as far as this is known before they are read."""

    source: WeightSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveWeightsReq:
    """Take the tensors that a group sends, and keep them aside."""

    source: WeightSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeWeightsReq:
    """Write weights in the place of the old ones. They have been checked and, if a group sent them, received. epoch: a
    name for what is computed from now on, which no other weights ever had."""

    source: WeightSource
    epoch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinGroupReq:
    """Meet a trainer at its TCP store. The first rank of the first replica is number `rank_offset` of the group."""

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveGroupReq:
    """Leave the group of `JoinGroupReq`."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseMemoryReq:
    """Give memory back to the system until `ResumeMemoryReq`. Weights are kept in a file; discard: they are not kept,
    and new ones have to come."""

    tags: tuple[MemoryTag, ...]
    discard: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeMemoryReq:
    """Take memory back."""

    tags: tuple[MemoryTag, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsDone:
    """An order was carried out. nbytes: of tensors that were written, or of memory that was given back or taken.
    missing: tensors that have to come before anything can be computed."""

    nbytes: int = 0
    missing: int = 0


WeightsOrder: TypeAlias = (
    CheckWeightsReq
    | ReceiveWeightsReq
    | ChangeWeightsReq
    | JoinGroupReq
    | LeaveGroupReq
    | ReleaseMemoryReq
    | ResumeMemoryReq
)
