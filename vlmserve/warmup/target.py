"""Who encodes: this process, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vlmserve.messages import EncodedItem
from vlmserve.warmup.requests import WarmupBody
from vlmserve_common.errors import VlmserveError


class WarmupStopped(VlmserveError):
    """Nothing further can be encoded: the run ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmed:
    """keys: of the entries that were found or made, as far as they are known."""

    items: tuple[EncodedItem, ...]
    keys: tuple[bytes, ...] = ()


class Target(Protocol):
    """settings: text that is another where the same medium would become other entries."""

    settings: str

    async def encode(self, body: WarmupBody) -> Warmed:
        """Return when everything is encoded and, where there is a disk, saved. BadRequestError and EngineError are
        about this request, WarmupStopped about all."""
        ...

    def holds(self, keys: Sequence[bytes]) -> bool:
        """Whether entries of these keys are still there, as far as that can be known."""
        ...

    def notes(self) -> list[str]:
        """What the user should know at the end, a sentence each."""
        ...

    async def close(self) -> None:
        """Break off what is under way, and write what waits to be written."""
        ...
