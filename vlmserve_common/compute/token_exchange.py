"""Exchanges tokens between processes that share a model and have requests of their own. Attention is data-parallel, and
everything else is shared (DeepSeek-V3, arXiv:2412.19437; SGLang's `--enable-dp-attention`).

`size` processes are `groups` of `members` each. A group has its own requests and their KV, and its members cut
attention heads among them. MLPs and experts are cut over all processes. So an MLP begins by bringing the tokens of all
groups together. It ends by adding up the partial results of all processes, and each group takes its own rows.

Padded to the longest group, rows take an all-gather and a reduce-scatter. Without padding they take two all-reduces.
`layout_of` chooses the way that moves less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vlmserve_common.compute.communicator import Collectives


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The rows of all groups' tokens, one group behind the other. sizes: tokens of each group. padded: whether each has
    as many rows as the longest."""

    sizes: tuple[int, ...]
    padded: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest group."""
        return max(self.sizes)

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return self.longest * len(self.sizes) if self.padded else sum(self.sizes)

    def of_group(self, group: int) -> slice:
        """Return the rows of a group's tokens."""
        start = self.longest * group if self.padded else sum(self.sizes[:group])
        return slice(start, start + self.sizes[group])


def rows_moved(layout: TokenLayout, members: int) -> float:
    """Return how many rows each process sends to bring tokens together and to take the sums back, with optimal
    algorithms. For n processes, gathering or scattering moves (n - 1) / n of all rows, and an all-reduce twice that."""
    groups = len(layout.sizes)
    size = groups * members
    if layout.padded:
        return 2 * (groups - 1) * layout.longest + 2 * (members - 1) / members * layout.longest
    return (2 * (groups - 1) / groups + 2 * (size - 1) / size) * layout.rows


def layout_of(sizes: Sequence[int], members: int = 1) -> TokenLayout:
    """Return the layout that moves less; if both move the same, the one with fewer rows to compute."""
    packed, padded = TokenLayout(tuple(sizes), False), TokenLayout(tuple(sizes), True)
    return padded if rows_moved(padded, members) < rows_moved(packed, members) else packed


class TokenExchange:
    """The exchange at a process of group number `group`.

    peers: the processes with the same place in each group. members: the `num_members` processes of this group; None if
    it is one. everybody: all processes.
    """

    def __init__(
        self,
        group: int,
        groups: int,
        *,
        peers: Collectives,
        members: Collectives | None,
        num_members: int,
        everybody: Collectives,
    ) -> None:
        self.group, self.groups, self.num_members = group, groups, num_members
        self._peers, self._members, self._everybody = peers, members, everybody
        self._layout: TokenLayout | None = None

    @contextmanager
    def among(self, sizes: Sequence[int]) -> Iterator[TokenLayout]:
        """Set the tokens of each group, at least one of which has some, inside this context. Outside, all groups have
        as many as this one."""
        before, self._layout = self._layout, layout_of(sizes, self.num_members)
        try:
            yield self._layout
        finally:
            self._layout = before

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all groups, [rows, ...], given x [n, ...] of this group's own. Padding is 0."""
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
        """Return the group's own tokens, [n, ...], of x [rows, ...] of all, in x's memory."""
        layout = self._layout or TokenLayout((len(x) // self.groups,) * self.groups, True)
        return x[layout.of_group(self.group)]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Add x [rows, ...] up over all processes, and return the sums of the group's own tokens [n, ...]."""
        layout = self._layout or TokenLayout((len(x) // self.groups,) * self.groups, True)
        if not layout.padded:
            return self.own(self._everybody.all_reduce(x))
        own = self._peers.reduce_scatter(x)
        if self._members is not None:
            own = self._members.all_reduce(own)
        return own[: layout.sizes[self.group]]
