"""What travels in front of a message: enough to answer for it, and to free what it holds, should it be unreadable."""

from __future__ import annotations

import json
from dataclasses import dataclass

from vlmserve_common.transport.wire import Frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """rids: the requests that the message is about. blocks: of `SharedArrays`, those that hold its arrays."""

    rids: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


def seal(envelope: Envelope) -> bytes:
    """An envelope as a frame."""
    return json.dumps([envelope.rids, envelope.blocks]).encode()


def unseal(frame: Frame) -> Envelope:
    """What a frame says; nothing, if it cannot be read."""
    try:
        rids, blocks = json.loads(bytes(frame))
        return Envelope(rids=_texts(rids), blocks=_texts(blocks))
    except Exception:  # of too many kinds, for a frame may hold anything
        return Envelope()


def _texts(values: list[str]) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("not a list of texts")
    return tuple(values)
