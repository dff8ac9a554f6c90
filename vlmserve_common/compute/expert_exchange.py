"""Brings tokens to their experts, and the results back, if several processes share the experts.

`Replicated`: all processes have all tokens. Each computes its own experts, and one all-reduce adds the results up.
`Dispatched`: each process has tokens of its own. It sends a token's row once to each process that has one of its
experts, and gets the weighted sum over those back (DeepSpeed-MoE, arXiv:2201.05596; DeepEP).

Rows that a rank moves, of N tokens that all `size` ranks have: an all-reduce moves 2 (size - 1) / size * N. Let each
rank take 1 / size of the tokens, and let `reached` ranks have experts of one token. Then sending rows, sums and results
moves (size - 1) / size * N * (1 + 2 * reached / size). Sending moves less only if `reached` is below half of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from vlmserve_common.compute.communicator import Collectives, Communicator
from vlmserve_common.compute.expert_part import first_placement, slots_of_parties
from vlmserve_common.compute.shard import Shard

Choice: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Experts [N, chosen] of each token, int64 (int32 on a GPU), and their scores [N, chosen] in its dtype."""
Compute: TypeAlias = Callable[[torch.Tensor, Choice], torch.Tensor]
"""x [n, size], slots here (below 0: elsewhere) and scores [n, chosen] -> weighted sums over these slots [n, size]."""


class Slots:
    """The slots of experts, numbered over all parties. `place` may move experts between steps.

    placement: the expert of each slot. counts int64 [count]: how often each expert was chosen, if this is `counted`.
    Counts and tables keep their memory, which captured steps read and write.
    """

    def __init__(self, count: int, shard: Shard) -> None:
        self.count, self.each = count, slots_of_parties(count, shard)
        self.members = shard.size // shard.experts.ep_size
        self.first = shard.rank // self.members * self.each
        self.counted = shard.experts.counted
        self.counts: torch.Tensor | None = None
        self.placement = first_placement(count, shard)
        self._most_copies = shard.experts.ep_size  # no party has an expert twice
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether an expert's slot always is its number, and choices are not counted."""
        return not self.counted and self.placement == tuple(range(self.count))

    def place(self, placement: tuple[int, ...]) -> None:
        """Put experts into these slots from now on."""
        self.placement = placement
        if self._found is not None:
            for table, new in zip(self._found, self._make_tables(), strict=True):
                table.copy_(new)

    def note(self, ids: torch.Tensor) -> None:
        """Count the experts that tokens go through, on the device, without waiting."""
        if self.counted:
            if self.counts is None:
                self.counts = torch.zeros(self.count, dtype=torch.int64, device=ids.device)
            flat = ids.flatten().long()
            self.counts.scatter_add_(0, flat, torch.ones_like(flat))

    def take_counts(self) -> torch.Tensor | None:
        """Return the counts so far, and begin anew; None if no token was ever counted."""
        if self.counts is None:
            return None
        taken = self.counts.clone()
        self.counts.zero_()
        return taken

    def of(self, ids: torch.Tensor, first_token: int = 0) -> torch.Tensor:
        """Return the slots of experts [n, chosen], for tokens from number `first_token` on. Tokens take turns at the
        copies of an expert."""
        if self.is_plain:
            return ids
        slots, copies = self._tables(ids.device)
        wanted = ids.long()
        turn = torch.arange(first_token, first_token + len(ids), device=ids.device)[:, None] % copies[wanted]
        return slots[wanted, turn].to(ids.dtype)

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots int64 [count, parties] of each expert, and their number int64 [count]."""
        if self._found is None:
            slots, copies = self._make_tables()
            self._found = slots.to(device), copies.to(device)
        return self._found

    def _make_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        own: list[list[int]] = [[] for _ in range(self.count)]
        for slot, expert in enumerate(self.placement):
            own[expert].append(slot)
        rows = [slots + [slots[0]] * (self._most_copies - len(slots)) for slots in own]
        return torch.tensor(rows), torch.tensor([len(slots) for slots in own])

    def here(self, slots: torch.Tensor, party_first: int | None = None) -> torch.Tensor:
        """Renumber slots for one party, by default this process's; -1 for slots of other parties."""
        own = slots - (self.first if party_first is None else party_first)
        return own.masked_fill((own < 0) | (own >= self.each), -1)


class Replicated:
    """Experts whose processes have all tokens: see the module docstring."""

    def __init__(self, slots: Slots, comm: Communicator) -> None:
        self._slots, self._comm = slots, comm

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Turn this process's tokens [n, size] into those that experts are chosen for here [N, size]."""
        return self._comm.all_tokens(x)

    def all_tokens(self, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all processes, given this process's and what `tokens` made of them."""
        return routed

    def __call__(
        self, x: torch.Tensor, choice: Choice, compute: Compute, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the sum of each token's experts [n, size], from x of `tokens` and the choice of each.

        beside: this process's part of another sum [N, size] of all tokens. It is added, and may be overwritten.
        """
        ids, scores = choice
        self._slots.note(self._comm.own_tokens(ids))
        out = compute(x, (self._slots.here(self._slots.of(ids)), scores))
        return self._comm.all_reduce(out if beside is None else out.add_(beside))


class Dispatched(Replicated):
    """Experts whose processes send tokens: see the module docstring."""

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_tokens(self, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        return self._comm.all_tokens(x)

    def __call__(
        self, x: torch.Tensor, choice: Choice, compute: Compute, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the sums. Each of the processes with the same tokens takes a stretch of these; the last ones may have
        fewer, or none."""
        ids, scores = choice
        self._slots.note(ids)
        same, shard = self._comm.attention.collectives, self._comm.attention.shard  # with the same tokens
        rows = -(-len(x) // shard.size)
        own = slice(min(len(x), shard.rank * rows), min(len(x), (shard.rank + 1) * rows))
        everybody = self._comm.collectives
        assert everybody is not None
        slots = self._slots.of(ids[own], own.start)
        made = dispatch(x[own], (slots, scores[own]), compute, self._slots, self._comm.shard.size, everybody)
        out = made
        if same is not None and rows:
            padded = x.new_zeros((rows, x.shape[1]))
            padded[: len(made)] = made
            out = same.all_gather(padded)[: len(x)]
        return out if beside is None else out.add_(self._comm.all_reduce(beside))


def dispatch(
    x: torch.Tensor, choice: Choice, compute: Compute, slots: Slots, size: int, together: Collectives
) -> torch.Tensor:
    """Send this process's own tokens x [n, width], with slots and scores [n, chosen], through experts at `size`
    processes; return their sums [n, width]. All processes call it at the same time; each may have any number of
    tokens."""
    wanted, scores = choice
    party = wanted.long() // slots.each
    reached = torch.zeros((len(x), size // slots.members), dtype=torch.bool, device=x.device).scatter_(1, party, True)
    tokens = [mask.nonzero()[:, 0] for mask in reached.t()]  # that go to each party, and so to all its members
    sent = [len(tokens[rank // slots.members]) for rank in range(size)]
    ones = [1] * size
    received = together.all_to_all(torch.tensor(sent, device=x.device), ones, ones).tolist()
    to = [tokens[rank // slots.members] for rank in range(size)]
    rows = together.all_to_all(x[torch.cat(to)], sent, received)
    # slots are whole numbers far below 2**24, and so fit beside scores
    about = torch.cat(
        [
            torch.cat((slots.here(wanted[own], rank // slots.members * slots.each).float(), scores[own].float()), dim=1)
            for rank, own in enumerate(to)
        ]
    )
    local, weights = together.all_to_all(about, sent, received).chunk(2, dim=1)
    made = compute(rows, (local.to(wanted.dtype).contiguous(), weights.to(scores.dtype).contiguous()))
    back = together.all_to_all(made, received, sent)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for own, part in zip(to, back.split(sent), strict=True):  # a token is once in each: the sum has one order
        out.index_add_(0, own, part.float())
    return out.to(x.dtype)


def moves_less_dispatched(chosen: int, shard: Shard) -> bool:
    """Return whether tokens that choose evenly reach less than half of the ranks; see the module docstring. Rows of
    attention groups have to travel to other processes in any case."""
    parties = shard.experts.ep_size
    if shard.groups > 1:
        return parties > 1
    reached = parties * (1 - (1 - 1 / parties) ** chosen)
    return reached < parties / 2


def sends_rows(chosen: int, shard: Shard) -> bool:
    """Return whether tokens are `Dispatched`, as `shard.experts.a2a` says. The host then waits in the middle of a
    step."""
    a2a = shard.experts.a2a
    return not shard.is_whole and (a2a == "torch" or (a2a == "auto" and moves_less_dispatched(chosen, shard)))


def make_exchange(slots: Slots, comm: Communicator, chosen: int) -> Replicated:
    """Make the exchange that `sends_rows` chooses."""
    return Dispatched(slots, comm) if sends_rows(chosen, comm.shard) else Replicated(slots, comm)
