"""What a check found."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """remedy: the command, or else what to do. data: the figures behind the text, for --json."""

    name: str
    text: str
    status: Status = Status.OK
    remedy: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
