"""How large a file may be, and which setting says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLimit:
    """bytes: the most. setting: its name, for errors."""

    bytes: int
    setting: str
