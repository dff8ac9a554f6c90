"""How fast a tower computes here, as its own pieces tell."""

from __future__ import annotations

from vision.towers.pieces import Kind, Piece

# Before anything was measured: a slow machine, so that the first pieces are not too long on any.
_GUESSED_S = {Kind.PRODUCT: 1 / 100e9, Kind.ATTENTION: 1 / 100e9, Kind.ELEMENTS: 1 / 400e6}
# Of what was measured before, with each piece; about the last fifty count.
_KEPT = 0.98


class Pace:
    """Seconds per cost of each kind of piece: a running mean. Also `PieceLimits`: pieces that take `piece_s` seconds,
    which may be changed.

    One thread tells what pieces took; any may ask.
    """

    def __init__(self, piece_s: float) -> None:
        self.piece_s = piece_s
        self._sums: dict[Kind, tuple[float, float]] = {}  # kind -> cost, seconds

    def took(self, piece: Piece, seconds: float) -> None:
        """A piece was computed."""
        cost, spent = self._sums.get(piece.kind, (0.0, 0.0))
        self._sums[piece.kind] = (cost * _KEPT + piece.cost, spent * _KEPT + seconds)

    def seconds(self, kind: Kind, cost: float) -> float:
        """What pieces of that cost together are going to take; a guess before the first of their kind."""
        measured, spent = self._sums.get(kind, (0.0, 0.0))
        return cost * (spent / measured if measured and spent else _GUESSED_S[kind])

    def most(self, kind: Kind) -> float:
        """See `PieceLimits`."""
        return self.piece_s / self.seconds(kind, 1.0)
