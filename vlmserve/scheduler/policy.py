"""The order in which waiting requests of a flow are tried, and which running request gives its place up for one.

Every policy is a key: lower goes first. Keys that reorder requests age them by their turn, which counts arrivals. So
a bounded number of later requests overtakes a request; only `priority` has no such bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from vlmserve.scheduler.req import Req

Key: TypeAlias = tuple[float, ...]

HEAD = 64
"""Policies that look at the prefix cache look at so many requests of the front of a queue only."""
AGEING = 16
"""Tokens that one arrival counts in keys made of tokens."""


class SchedulePolicy(Protocol):
    """Orders waiting requests by keys.

    static: a request's key does not change while it waits. preempts: a request may take the place of a running one
    whose key is worse.
    """

    static: bool
    preempts: bool

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """Return the sort keys of waiting requests; of at most `HEAD` at a time, if they are not static."""
        ...


class _Static:
    """A policy whose keys depend on the request alone."""

    static = True

    def __init__(self, key: Callable[[Req], Key], *, preempts: bool = False) -> None:
        self._key = key
        self.preempts = preempts

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """Return the key of each request."""
        return [self._key(req) for req in reqs]


class LongestPrefixMatch:
    """Puts requests with most cached tokens first. match: returns a request's cached tokens, and changes nothing."""

    static = False
    preempts = False

    def __init__(self, match: Callable[[Req], int]) -> None:
        self._match = match

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """Return the age of each request, less the tokens that are cached."""
        return [(AGEING * req.turn - self._match(req), req.turn) for req in reqs]


class DfsWeight:
    """Puts requests that share cached prefixes side by side, the prefixes that most requests share first.

    path: returns the nodes of the prefix cache along a request's cached prefix, from the root. A node is any number.
    """

    static = False
    preempts = False

    def __init__(self, path: Callable[[Req], Sequence[int]]) -> None:
        self._path = path

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """Return the weights along each path. Sorting by them is a depth-first walk, heaviest child first. A request
        that was overtaken by `HEAD` later ones goes first."""
        paths = [self._path(req) for req in reqs]
        weight = Counter(node for path in paths for node in path)
        newest = max((req.turn for req in reqs), default=0)
        keys = []
        for req, path in zip(reqs, paths, strict=True):
            late = newest - req.turn > HEAD
            steps = [float(part) for node in path for part in (-weight[node], node)] if not late else []
            keys.append((float(not late), *steps, float("inf"), req.turn))
        return keys


def make_policy(
    name: str, *, match: Callable[[Req], int], path: Callable[[Req], Sequence[int]], seed: int = 0
) -> SchedulePolicy:
    """Make the policy of a --schedule-policy; ValueError for other names. match: see `LongestPrefixMatch`. path: see
    `DfsWeight`."""
    match name:
        case "fcfs":
            return _Static(lambda req: (req.turn,))
        case "lpm":
            return LongestPrefixMatch(match)
        case "dfs-weight":
            return DfsWeight(path)
        case "lof":
            return _Static(lambda req: (AGEING * req.turn - req.remaining_new_tokens, req.turn))
        case "srtf":
            return _Static(lambda req: (AGEING * req.turn + req.prompt_len + req.max_new_tokens, req.turn))
        case "random":
            return _Static(lambda req: (req.turn + HEAD * _noise(req.arrival, seed), req.turn))
        case "priority":
            return _Static(lambda req: (req.priority, req.turn), preempts=True)
    raise ValueError(f"there is no schedule policy {name!r} (--schedule-policy)")


def _noise(arrival: int, seed: int) -> float:
    """Return a number in [0, 1) that looks random (Knuth's multiplicative hash, twice)."""
    mixed = (arrival * 2654435761 + seed * 40503 + 12345) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) / 2**32


def less_urgent(waiting: Req, running: Sequence[Req]) -> Req | None:
    """Return the running request with the worst priority, if that is worse than the waiting request's. Lower numbers
    go first."""
    victim = max(running, key=lambda req: (req.priority, req.arrival), default=None)
    return victim if victim is not None and victim.priority > waiting.priority else None


def over_share(waiting: Req, running: Sequence[Req], places: int) -> Req | None:
    """Return the newest running request of the client with most places, if that client has more than its share of them
    and the waiting request's client has less. The prompts of one client share its places in the same way."""
    for owner in (lambda req: req.client, lambda req: req.group):
        held = Counter(owner(req) for req in running)
        held.setdefault(owner(waiting), 0)
        name, most = held.most_common(1)[0]
        share = places / len(held)
        if most > share and held[owner(waiting)] + 1 < most and held[owner(waiting)] < share:
            return max((req for req in running if owner(req) == name), key=lambda req: req.turn)
    return None
