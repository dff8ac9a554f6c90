"""The order to other ranks to record their steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOrder:
    """Record the steps from here on, into a trace beside `path`; without a path, write what was recorded. activities:
    those of `StartProfileReq`."""

    path: str | None = None
    activities: tuple[str, ...] = ()
