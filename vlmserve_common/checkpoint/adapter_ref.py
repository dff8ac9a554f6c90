"""The name of a LoRA adapter that was loaded, as messages carry it, and where adapters may lie. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlmserve_common.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRef:
    """An adapter that was loaded. digest: of all of its files; it is the adapter's identity in every cache. path: its
    folder. tower: whether it changes embeddings of pictures."""

    digest: str
    path: str
    tower: bool


def check_place(path: str, folder: str | None) -> None:
    """Raise CheckpointError unless the folder of an adapter is one that may be read. folder: it must lie below; None:
    it may lie anywhere."""
    try:
        parents = Path(path).resolve().parents
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a byte of 0
        raise CheckpointError(f"{path!r}: {error}") from None
    if folder is not None and Path(folder).resolve() not in parents:
        raise CheckpointError(f"{path!r}, which is not below {folder} (setting --allowed-lora-path)")
