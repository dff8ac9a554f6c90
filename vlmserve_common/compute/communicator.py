"""The connections between the processes that share a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from vlmserve_common.compute.shard import WHOLE, Shard
from vlmserve_common.compute.token_exchange import TokenExchange
from vlmserve_common.kernels.decoder import Sums


class Collectives(Protocol):
    """Exchanges between processes. All processes call them in the same order, with tensors on the model's device."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, in x's memory; x is contiguous."""

    def in_operators(self) -> Sums | None:
        """Return what operators that compute several layers in one call add up with; None where they cannot."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Write the first process's x to every process's x, and return it; x is contiguous."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every process's x, in order, at the first process; an empty list elsewhere."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x [n, ...] of every process, in order, as [size * n, ...]. All have n rows; x is contiguous."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's n rows of the sum of x [size * n, ...] over all processes; x is contiguous."""

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send each process its rows of x, `sent` of them in order, and return the rows that came from each, `received`
        of them in order; x is contiguous."""


class Link(Protocol):
    """The connection from a pipeline stage to another one. Tensors arrive in the order in which they were sent."""

    def send(self, x: torch.Tensor) -> None:
        """Send x from the one stage, and return at once. x may not be changed afterwards."""

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Wait, at the other stage, for the next tensor, which is written to x and returned."""


@dataclass(frozen=True, eq=False, slots=True)
class Communicator:
    """The connections of one process, which has part `shard` of a model. Without connections, the part is only looked
    at.

    collectives: of the ranks of one pipeline stage. attention_collectives: of the ranks of one attention group; tokens:
    the exchange between the groups; both None with one group. before, behind: links from the stage before and to the
    next. guesses: link from the last stage to the first one.
    """

    shard: Shard = WHOLE
    collectives: Collectives | None = None
    attention_collectives: Collectives | None = None
    tokens: TokenExchange | None = None
    before: Link | None = None
    behind: Link | None = None
    guesses: Link | None = None

    @property
    def attention(self) -> Communicator:
        """The connections of the ranks that share this rank's tokens, and so cut its attention heads."""
        if self.shard.groups == 1:
            return self
        return Communicator(self.shard.attention, self.attention_collectives)

    def among(self, sizes: Sequence[int]) -> AbstractContextManager[object]:
        """Set the tokens of each group inside this context: see `TokenExchange`."""
        return nullcontext() if self.tokens is None else self.tokens.among(sizes)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all groups' tokens, given x [N, ...] of this group's."""
        return x if self.tokens is None else self.tokens.gather(x)

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of this group's tokens, given x [N, ...] of all groups'."""
        return x if self.tokens is None else self.tokens.own(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add x [N, ...] of all tokens up over all ranks, and return the rows of this group's tokens.

        The sum is in x's memory if there is one group. A process alone gets x back.
        """
        if self.tokens is not None:
            return self.tokens.scatter(x)
        return x if self.collectives is None else self.collectives.all_reduce(x)


ALONE = Communicator()
