"""Embedding stores for tests: rows that follow from a number, a clock set by hand, and what lies in a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from vision.cache.store import EmbeddingStore

FINGERPRINT = bytes(range(32))
ABOUT = {"model": "a model", "family": "qwen3_vl", "dtype": "bfloat16", "row_width": "64", "version": "0.1.0"}
HEADER = 512


class Clock:
    """Seconds since 1970, set by hand."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def key(number: int) -> bytes:
    """A key as good as random."""
    return hashlib.sha256(str(number).encode()).digest()


def rows(number: int, *, count: int = 8, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows unlike those of other numbers; by default 1024 bytes."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn((count, width), generator=generator).to(dtype)


def open_store(folder: Path, *, limit: int = 1 << 30, **options) -> EmbeddingStore:
    return EmbeddingStore(folder, **{"fingerprint": FINGERPRINT, "limit_bytes": limit, "about": ABOUT, **options})


def file_of(folder: Path, number: int, fingerprint: bytes = FINGERPRINT) -> Path:
    name = key(number).hex()
    return folder / "v1" / fingerprint.hex() / name[:2] / f"{name}.safetensors"


def holds(store: EmbeddingStore, number: int, **form) -> bool:
    """Whether rows are there; wrong ones are an error."""
    got = store.get(key(number))
    if got is None:
        return False
    want = rows(number, **form)
    assert got.dtype == want.dtype
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    return True


def entry_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def temporary_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.part"))


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in entry_files(folder))
