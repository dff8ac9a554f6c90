"""What becomes of a request to encode, here or in a server."""

from __future__ import annotations

from dataclasses import dataclass

from vlmserve.ipc.messages import EncodedItem
from vlmserve_common.errors import VlmserveError


class WarmupStopped(VlmserveError):
    """Nothing further can be encoded: the run ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmed:
    """keys: of the entries that were found or made, as far as they are known."""

    items: tuple[EncodedItem, ...]
    keys: tuple[bytes, ...] = ()
