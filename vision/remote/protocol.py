"""The messages between a server and an encoder elsewhere.

The server (the consumer) calls. Each side first tells which tower it has. Then, for each temporal patch:

    consumer                                  encoder
      Ask: content hash, grid, shape  ------>   holds it in its pool under a lease; looks in all tiers of its cache
                                      <------ Answer NOT_READY: it waits, or is being encoded
                                      <------ Answer MISSING: it is in no tier, and has its turn to be encoded
      Pixels                          ------>
                                      <------ Answer OK: the rows can be pulled
      Pull                            ------>
                                      <------ Rows
      Release                         ------>   the lease ends

INCOMPATIBLE and ERROR end a lease, too. The consumer registers the place for the rows before it asks, so nothing that
an encoder sends comes too early. It sends `Renew` every `RENEW_S` seconds, which the encoder answers with `Alive`; a
lease that is not renewed for `LEASE_S` seconds ends. Either side ends the connection when it hears nothing for
`SILENT_S` seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

import numpy as np
import torch

from vision.towers.temporal_patch import TemporalPatch

PROTOCOL = 2
LEASE_S = 30.0
RENEW_S = 1.0
SILENT_S = 5.0
MOST_BYTES = 2**30
"""The largest message: pixels or rows of one temporal patch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerIdentity:
    """What two sides must have in common. fingerprint: of the tower's weights and settings, in hex. width: elements of
    a row, DeepStack's included. merge: patches a side that become a row."""

    family: str
    fingerprint: str
    dtype: str
    width: int
    merge: int

    def differences(self, there: TowerIdentity) -> str:
        """Return what another tower has otherwise, for people; "" if nothing."""
        names = {"family": "model family", "fingerprint": "tower's fingerprint", "width": "row width"}
        pairs = [(field.name, getattr(there, field.name), getattr(self, field.name)) for field in fields(self)]
        return ", ".join(
            f"{names.get(name, name)} is {str(other)[:16]} there and {str(own)[:16]} here"
            for name, other, own in pairs
            if other != own
        )


class Status(enum.StrEnum):
    """What an encoder has to say about a temporal patch."""

    OK = "ok"
    MISSING = "missing"
    NOT_READY = "not ready"
    INCOMPATIBLE = "incompatible"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message of either side. tower: the sender's."""

    tower: TowerIdentity


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Rows are needed. number: the consumer's, new for each ask. patch: without its pixels. shape: of the place that is
    registered for the rows."""

    number: int
    patch: TemporalPatch
    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The state of what was asked for. reason: for INCOMPATIBLE and ERROR."""

    number: int
    status: Status
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """The pixels of a patch; see `TemporalPatch`."""

    number: int
    pixels: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """The rows are to be sent."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows [n, width] of a patch, in the tower's dtype."""

    number: int
    rows: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The rows have come, or are not wanted any more."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    """The consumer lives, and needs the rows that it asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """The encoder lives."""


FROM_CONSUMER = (Hello, Ask, Pixels, Pull, Release, Renew)
FROM_ENCODER = (Hello, Answer, Rows, Alive)
