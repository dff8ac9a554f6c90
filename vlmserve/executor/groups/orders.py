"""What the first rank tells the others where groups of them have requests of their own: one order for all groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from vlmserve.executor.ranks.orders import ForwardOrder, SampleOrder
from vlmserve_common.transport.wire import WireCodec, join, split


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardRound:
    """A step of each group; None: that has none, and joins the others. Embeddings follow, those of the first group
    first."""

    steps: tuple[ForwardOrder | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRound:
    """The step of each group that is sampled; None: none is. Tokens follow, those of the first group first."""

    steps: tuple[SampleOrder | None, ...]


Round: TypeAlias = ForwardRound | SampleRound


class RoundCodec:
    """Orders as bytes (see `WireCodec`: never pickle)."""

    def __init__(self) -> None:
        self._codec = WireCodec([ForwardRound, SampleRound])

    def encode(self, order: Round) -> bytes:
        """The bytes of an order."""
        return join(self._codec.encode(order))

    def decode(self, order: bytes) -> Round:
        """The order in some bytes. WireError if there is none."""
        found: Round = self._codec.decode(split(order))
        return found
