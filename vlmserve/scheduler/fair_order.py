"""In which order pictures and videos are encoded: clients in turns, by how much there is to encode."""

from __future__ import annotations

_REMEMBERED = 4096
_ARRIVAL_BITS = 40


class FairOrder:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request's tag is where its client's work so far ends, on
    a clock that stands at the tag of what was encoded last; the lowest tag goes first. So a client with a hundred
    pictures and one with a single picture take turns, patch for patch.
    """

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}  # of clients' work, in patches
        self._latest = 0
        self._arrivals = 0

    def arrive(self) -> int:
        """The number of a new request, from 0 on."""
        self._arrivals += 1
        return self._arrivals - 1

    def tag(self, client: str, patches: int, arrival: int) -> int:
        """The tag of a new request; no two are equal. arrival: what `arrive` gave it."""
        start = max(self._now, self._ends.pop(client, 0))
        self._ends[client] = start + patches
        if len(self._ends) > _REMEMBERED:
            del self._ends[next(iter(self._ends))]
        tag = start << _ARRIVAL_BITS | arrival << 1
        self._latest = max(self._latest, tag)
        return tag

    def behind_all(self) -> int:
        """A tag behind those of all requests so far, and of no request."""
        return self._latest | 1

    def encoded(self, tag: int) -> None:
        """The media of a request are encoded."""
        self._now = max(self._now, tag >> _ARRIVAL_BITS)
