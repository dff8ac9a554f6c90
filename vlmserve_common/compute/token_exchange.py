"""Processes that share a model and yet have tokens of their own: attention is data-parallel, and all else is shared
(DeepSeek-V3, arXiv:2412.19437; SGLang's `--enable-dp-attention`).

`size` processes are `groups` of `members` each. A group has its own requests and their KV, and its members cut
attention heads among them; MLPs and experts are cut over all processes. So an MLP begins by bringing the tokens of all
groups together, and ends by adding up what each process makes of them, of which each takes its own: an all-gather and
a reduce-scatter, for which groups are padded to the longest one, or two all-reduces of as many rows as there are
tokens, whichever moves less (`layout_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch


class Peers(Protocol):
    """See `compute.shard.Collectives`."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Rows of the tokens of all groups, of which each has `sizes`: one group behind the other. padded: each has as many
    rows as the longest."""

    sizes: tuple[int, ...]
    padded: bool

    @property
    def longest(self) -> int:
        """Tokens of the group that has most."""
        return max(self.sizes)

    @property
    def rows(self) -> int:
        """Of all groups."""
        return self.longest * len(self.sizes) if self.padded else sum(self.sizes)

    def of_group(self, group: int) -> slice:
        """The rows of a group's tokens."""
        start = self.longest * group if self.padded else sum(self.sizes[:group])
        return slice(start, start + self.sizes[group])


def rows_moved(layout: TokenLayout, members: int) -> float:
    """How many rows each process sends to bring tokens together and to take the sums back, by algorithms that send no
    more than they must: (n - 1) / n of what n processes have together for a gathering or a scattering, and twice that
    for an all-reduce."""
    groups = len(layout.sizes)
    size = groups * members
    if layout.padded:
        return 2 * (groups - 1) * layout.longest + 2 * (members - 1) / members * layout.longest
    return (2 * (groups - 1) / groups + 2 * (size - 1) / size) * layout.rows


def layout_of(sizes: Sequence[int], members: int = 1) -> TokenLayout:
    """What moves less; where both move as much, what has fewer rows to compute."""
    packed, padded = TokenLayout(tuple(sizes), False), TokenLayout(tuple(sizes), True)
    return padded if rows_moved(padded, members) < rows_moved(packed, members) else packed


class TokenExchange:
    """At a process of group number `group`.

    peers: the processes of all groups, one of each, that have the same place in theirs. members: those of this group,
    `num_members` of them; None where it is one. everybody: all.
    """

    def __init__(
        self, group: int, groups: int, *, peers: Peers, members: Peers | None, num_members: int, everybody: Peers
    ) -> None:
        self.group, self.groups, self.num_members = group, groups, num_members
        self._peers, self._members, self._everybody = peers, members, everybody
        self._layout: TokenLayout | None = None

    @contextmanager
    def among(self, sizes: Sequence[int]) -> Iterator[TokenLayout]:
        """For as long as groups have so many tokens each, not all of them none. Without it, they have as many as this
        one."""
        before, self._layout = self._layout, layout_of(sizes, self.num_members)
        try:
            yield self._layout
        finally:
            self._layout = before

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ...] of the group's own tokens -> those of all, [rows, ...]; where there is padding, 0."""
        layout = self._layout or TokenLayout((len(x),) * self.groups, True)
        assert len(x) == layout.sizes[self.group], "not the tokens of this step"
        if layout.padded:
            if len(x) < layout.longest:
                x = torch.cat((x, x.new_zeros((layout.longest - len(x), *x.shape[1:]))))
            return self._peers.all_gather(x.contiguous())
        together = x.new_zeros((layout.rows, *x.shape[1:]))
        together[layout.of_group(self.group)] = x
        return self._peers.all_reduce(together)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, ...] of the tokens of all -> those of the group's own, [n, ...], in x's memory."""
        layout = self._layout or TokenLayout((len(x) // self.groups,) * self.groups, True)
        return x[layout.of_group(self.group)]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, ...], of which each process has a part of the sum -> the sums of the group's own tokens [n, ...]."""
        layout = self._layout or TokenLayout((len(x) // self.groups,) * self.groups, True)
        if not layout.padded:
            return self.own(self._everybody.all_reduce(x))
        own = self._peers.reduce_scatter(x)
        if self._members is not None:
            own = self._members.all_reduce(own)
        return own[: layout.sizes[self.group]]
