"""Whose place a waiting request may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vlmserve.scheduler.req import Req


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
