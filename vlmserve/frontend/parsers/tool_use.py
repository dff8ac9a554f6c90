"""How the answers to a request may use its tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vlmserve.frontend.parsers.calls import CallFormat, Tool


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """tools: those that there are, at least one. call_format: how the model calls them. choice: auto, if it likes;
    required, at least one of them. name: the one that it must call, once. parallel: whether it may call several."""

    tools: Sequence[Tool]
    call_format: CallFormat
    choice: Literal["auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def required(self) -> bool:
        """Whether the answer must be a call."""
        return self.name is not None or self.choice == "required"
