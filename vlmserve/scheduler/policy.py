"""The order in which waiting requests of a flow are tried, and which running request gives its place up for one.

Every policy is a key: lower goes first. Keys that reorder requests age them by their turn, which counts arrivals. So
a bounded number of later requests overtakes a request; only `priority` has no such bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from vlmserve.scheduler.req import Req

Key: TypeAlias = tuple[float, ...]

HEAD = 64
"""Policies that look at the prefix cache look at so many requests of the front of a queue only."""
AGEING = 16
"""Tokens that one arrival counts in keys made of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """Orders waiting requests by keys.

    keys: returns the sort keys of waiting requests; of at most `HEAD` at a time, if they are not static. static: a
    request's key depends on the request alone, and does not change while it waits. preempts: a request may take the
    place of a running one whose key is worse.
    """

    keys: Callable[[Sequence[Req]], list[Key]]
    static: bool = True
    preempts: bool = False


def make_policy(
    name: str, *, match: Callable[[Req], int], path: Callable[[Req], Sequence[int]], seed: int = 0
) -> SchedulePolicy:
    """Make the policy of a --schedule-policy.

    match: returns a request's cached tokens, and changes nothing. path: returns the nodes of the prefix cache along a
    request's cached prefix, from the root; a node is any number.
    """

    keys: dict[str, Callable[[Req], Key]] = {
        "fcfs": lambda req: (req.turn,),
        "lpm": lambda req: (AGEING * req.turn - match(req), req.turn),  # most cached tokens first
        "lof": lambda req: (AGEING * req.turn - req.remaining_new_tokens, req.turn),
        "srtf": lambda req: (AGEING * req.turn + req.prompt_len + req.max_new_tokens, req.turn),
        "random": lambda req: (req.turn + HEAD * _noise(req.arrival, seed), req.turn),
        "priority": lambda req: (req.priority, req.turn),
    }
    if name == "dfs-weight":
        return SchedulePolicy(keys=partial(_dfs_keys, path), static=False)
    key = keys[name]
    return SchedulePolicy(
        keys=lambda reqs: [key(req) for req in reqs], static=name != "lpm", preempts=name == "priority"
    )


def _dfs_keys(path: Callable[[Req], Sequence[int]], reqs: Sequence[Req]) -> list[Key]:
    """Put requests that share cached prefixes side by side, the prefixes that most requests share first.

    Sorting by the weights along each path is a depth-first walk, heaviest child first. A request that was overtaken by
    `HEAD` later ones goes first.
    """
    paths = [path(req) for req in reqs]
    weight = Counter(node for nodes in paths for node in nodes)
    newest = max((req.turn for req in reqs), default=0)
    keys = []
    for req, nodes in zip(reqs, paths, strict=True):
        late = newest - req.turn > HEAD
        steps = [float(part) for node in nodes for part in (-weight[node], node)] if not late else []
        keys.append((float(not late), *steps, float("inf"), req.turn))
    return keys


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
