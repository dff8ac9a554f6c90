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
"""Policies that look at the prefix cache look at so many requests of the front of a queue, and at no others."""
AGEING = 16
"""Tokens that one arrival counts in keys made of tokens."""


class SchedulePolicy(Protocol):
    """static: a request's key does not change while it waits. preempts: a request may take the place of a running one
    whose key is worse."""

    static: bool
    preempts: bool

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """Sort keys of requests that wait; asked for `HEAD` at a time, at the most, if they are not static."""
        ...


class _Static:
    """A policy whose keys depend on the request alone."""

    static = True

    def __init__(self, key: Callable[[Req], Key], *, preempts: bool = False) -> None:
        self._key = key
        self.preempts = preempts

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """See `SchedulePolicy`."""
        return [self._key(req) for req in reqs]


class LongestPrefixMatch:
    """Most cached tokens first. match: cached tokens of a request; must change nothing."""

    static = False
    preempts = False

    def __init__(self, match: Callable[[Req], int]) -> None:
        self._match = match

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """See `SchedulePolicy`."""
        return [(AGEING * req.turn - self._match(req), req.turn) for req in reqs]


class DfsWeight:
    """Requests that share cached prefixes side by side, the prefixes that most requests share first.

    path: the nodes of the prefix cache along a request's cached prefix, from the root, by any number of their own.
    """

    static = False
    preempts = False

    def __init__(self, path: Callable[[Req], Sequence[int]]) -> None:
        self._path = path

    def keys(self, reqs: Sequence[Req]) -> list[Key]:
        """See `SchedulePolicy`. Sorting by the weights along the paths is a depth-first walk, heaviest child first.
        What has waited for `HEAD` others goes before it."""
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
    """The policy of a --schedule-policy; match, path: see `LongestPrefixMatch`, `DfsWeight`. ValueError for others."""
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
    """A number in [0, 1) that looks random (Knuth's multiplicative hash, twice)."""
    mixed = (arrival * 2654435761 + seed * 40503 + 12345) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) / 2**32


def less_urgent(waiting: Req, running: Sequence[Req]) -> Req | None:
    """By priority (lower goes first): the running request of the lowest, if that is lower than the waiting one's."""
    victim = max(running, key=lambda req: (req.priority, req.arrival), default=None)
    return victim if victim is not None and victim.priority > waiting.priority else None


def over_share(waiting: Req, running: Sequence[Req], places: int) -> Req | None:
    """By clients: the newest running request of the client with the most, if it has more than its share of the places
    and the waiting one's client has less than that. Among the answers to one prompt and other requests of a client
    likewise: the prompt with the most."""
    for owner in (lambda req: req.client, lambda req: req.group):
        held = Counter(owner(req) for req in running)
        held.setdefault(owner(waiting), 0)
        name, most = held.most_common(1)[0]
        share = places / len(held)
        if most > share and held[owner(waiting)] + 1 < most and held[owner(waiting)] < share:
            return max((req for req in running if owner(req) == name), key=lambda req: req.turn)
    return None
