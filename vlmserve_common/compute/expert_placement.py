"""Places experts so that all parties have about the same work, and moves their weights.

Spare slots go one by one to a copy of the expert with most work for each copy. Then experts, the busiest first, go to
the party with least work so far (DeepSeek's EPLB, https://github.com/deepseek-ai/EPLB).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.expert_exchange import Slots
from vlmserve_common.compute.experts import Experts

Placement = tuple[int, ...]
"""The expert of each slot, those of all parties one behind the other."""


def place(loads: Sequence[float], old: Placement, parties: int) -> Placement:
    """Return a placement for experts of such loads. No party has an expert twice. Experts that stay at a party stay in
    their slots."""
    each, count = len(old) // parties, len(loads)
    copies = [1] * count
    for _ in range(len(old) - count):
        able = [expert for expert in range(count) if copies[expert] < parties]
        copies[max(able, key=lambda expert: loads[expert] / copies[expert])] += 1
    # filling the emptiest party first always ends well, the least busy one nearly always
    packed = _pack(loads, copies, each, parties, lambda busy, room: (busy, -room))
    packed = packed or _pack(loads, copies, each, parties, lambda busy, room: (-room, busy))
    assert packed is not None
    kept = [old[party * each : (party + 1) * each] for party in range(parties)]
    return tuple(expert for own, before in zip(packed, kept, strict=True) for expert in _in_order(own, before))


def _pack(
    loads: Sequence[float],
    copies: Sequence[int],
    each: int,
    parties: int,
    rank: Callable[[float, int], tuple[float, float]],
) -> list[list[int]] | None:
    own: list[list[int]] = [[] for _ in range(parties)]
    busy = [0.0] * parties
    order = sorted(range(len(loads)), key=lambda expert: (-copies[expert], -loads[expert] / copies[expert], expert))
    for expert in order:
        able = [party for party in range(parties) if len(own[party]) < each]
        if len(able) < copies[expert]:
            return None
        able.sort(key=lambda party: (*rank(busy[party], each - len(own[party])), party))
        for party in able[: copies[expert]]:
            own[party].append(expert)
            busy[party] += loads[expert] / copies[expert]
    return own


def _in_order(own: Sequence[int], before: Sequence[int]) -> list[int]:
    new = [expert for expert in own if expert not in before]
    return [expert if expert in own else new.pop(0) for expert in before]


def imbalance(loads: Sequence[float], placement: Placement, parties: int) -> float:
    """Return the work of the busiest party, as a multiple of the mean."""
    each = len(placement) // parties
    shares = [loads[expert] / placement.count(expert) for expert in placement]
    busy = [sum(shares[party * each : (party + 1) * each]) for party in range(parties)]
    return max(busy) * parties / sum(busy) if sum(busy) else 1.0


def move(experts: Experts, slots: Slots, new: Placement, comm: Communicator) -> int:
    """Move a sparse MLP's experts to a new placement; all ranks call it together. Return how many slots got another
    expert.

    Rows of bytes go from a rank that has the expert to the rank of the same number in the other party.
    """
    old, each, members = slots.placement, slots.each, slots.members
    size = comm.shard.size
    party, member = divmod(comm.shard.rank, members)
    wanted = [slot for slot in range(len(new)) if new[slot] != old[slot]]
    source = {slot: _source(old, new[slot], slot // each, each) for slot in wanted}
    # source and target slots, by the other's rank
    sent = [(source[slot] % each, slot // each) for slot in wanted if source[slot] // each == party]
    received = [(slot % each, source[slot] // each) for slot in wanted if slot // each == party]
    assert comm.collectives is not None
    for rows in experts.rows_of_slots():
        out = rows[[slot for slot, _ in sorted(sent, key=lambda entry: entry[1])]]
        came = comm.collectives.all_to_all(
            out, _by_rank(sent, member, members, size), _by_rank(received, member, members, size)
        )
        rows[[slot for slot, _ in sorted(received, key=lambda entry: entry[1])]] = came
    slots.place(new)
    experts.part = replace(experts.part, own=new[party * each : (party + 1) * each])
    return len(wanted)


def _source(old: Placement, expert: int, party: int, each: int) -> int:
    """Return the slot from which a party gets an expert: parties take turns at the slots that have it."""
    having = [slot for slot, there in enumerate(old) if there == expert]
    own = [slot for slot in having if slot // each == party]
    return own[0] if own else having[party % len(having)]


def _by_rank(moves: Sequence[tuple[int, int]], member: int, members: int, size: int) -> list[int]:
    counts = [0] * size
    for _, party in moves:
        counts[party * members + member] += 1
    return counts


def loads_of(slots: Sequence[Slots], comm: Communicator) -> list[list[int]]:
    """Return how often experts of each sparse MLP were chosen since the last call, the same at all ranks."""
    counts = [one.take_counts() for one in slots]
    known = next((one for one in counts if one is not None), None)
    if known is None:
        return [[0] * one.count for one in slots]
    stacked = torch.stack([torch.zeros_like(known) if one is None else one for one in counts])
    assert comm.collectives is not None
    found: list[list[int]] = comm.collectives.all_reduce(stacked).tolist()
    return found
