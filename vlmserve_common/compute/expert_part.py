"""Divides the experts of a sparse MLP among processes.

`ep_size` parties of a tensor-parallel group have experts of their own, one behind the other. The members of a party cut
each of its experts by inner elements, as other MLPs are cut. `redundant` slots, spread evenly over the parties, hold
copies of busy experts (DeepSeek's EPLB, https://github.com/deepseek-ai/EPLB).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from vlmserve_common.compute.shard import WHOLE, Shard
from vlmserve_common.errors import EngineError

Stretch = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPart:
    """One process's part of `count` experts of `inner` elements: the experts of its slots (`own`), and `size` elements
    of each, from number `first` on."""

    count: int
    inner: int
    own: tuple[int, ...]
    first: int
    size: int

    @property
    def cuts_experts(self) -> bool:
        """Whether other processes have elements of its experts."""
        return self.size < self.inner

    @property
    def is_whole(self) -> bool:
        """Whether everything is here."""
        return not self.cuts_experts and self.own == tuple(range(self.count))

    @property
    def elsewhere(self) -> list[int]:
        """Experts that are not here."""
        return sorted(set(range(self.count)).difference(self.own))

    def stretches_of_experts(self) -> tuple[Stretch, ...]:
        """The slots' experts as stretches (start, size) of all."""
        return tuple(_stretches(self.own))


def _stretches(experts: Sequence[int]) -> Iterator[Stretch]:
    for _, run in groupby(enumerate(experts), lambda entry: entry[1] - entry[0]):
        found = [expert for _, expert in run]
        yield found[0], len(found)


def slots_of_parties(count: int, shard: Shard) -> int:
    """Return the slots of each party for `count` experts. EngineError if they cannot be spread evenly."""
    sharing = shard.experts
    ep_size, slots = sharing.ep_size, count + sharing.redundant
    if slots % ep_size:
        more = f" and --ep-num-redundant-experts {sharing.redundant}" if sharing.redundant else ""
        raise EngineError(f"--ep-size is {ep_size}: num_experts is {count}{more}, which it does not divide")
    if sharing.redundant > count * (ep_size - 1):
        raise EngineError(
            f"--ep-num-redundant-experts is {sharing.redundant}: {ep_size} parties (--ep-size) have room for "
            f"{count * (ep_size - 1)} copies of {count} experts at the most"
        )
    return slots // ep_size


def first_placement(count: int, shard: Shard) -> tuple[int, ...]:
    """Return the expert of each slot, party by party, before any loads are known."""
    slots_of_parties(count, shard)
    return tuple(slot % count for slot in range(count + shard.experts.redundant))


def part_of_experts(count: int, inner: int, shard: Shard = WHOLE) -> ExpertPart:
    """Return a process's part at the start. inner: moe_intermediate_size. EngineError for sizes that do not divide."""
    if shard.is_whole:
        return ExpertPart(count=count, inner=inner, own=tuple(range(count)), first=0, size=inner)
    slots = slots_of_parties(count, shard)
    members = shard.size // shard.experts.ep_size
    if inner % members:
        ep = f" and --ep-size {shard.experts.ep_size}" if shard.experts.ep_size > 1 else ""
        raise EngineError(
            f"--tp-size is {shard.size}{ep}: {members} ranks cut each expert, whose moe_intermediate_size is {inner}, "
            "which they do not divide"
        )
    party, member = divmod(shard.rank, members)
    size = inner // members
    own = first_placement(count, shard)[party * slots : (party + 1) * slots]
    return ExpertPart(count=count, inner=inner, own=own, first=member * size, size=size)
