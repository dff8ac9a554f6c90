"""The orders to the other ranks to load or forget a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from vlmserve_common.checkpoint.adapter_ref import AdapterRef


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAdapterOrder:
    """Load a LoRA adapter that the first rank has. Its files must be the same here."""

    adapter: AdapterRef


@dataclass(frozen=True, kw_only=True, slots=True)
class UnloadAdapterOrder:
    """Forget a LoRA adapter."""

    digest: str


AdapterOrder: TypeAlias = LoadAdapterOrder | UnloadAdapterOrder
