"""The inline vision encoder: a tower on the model's own device, with a cache of what it encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vision.embedding_cache import EmbeddingCache


class EncodableItem(Protocol):
    """What the encoder needs of a media item; see `processors.inputs.MultimodalDataItem`."""

    @property
    def digest(self) -> bytes: ...
    @property
    def grid_thw(self) -> tuple[int, int, int]: ...
    @property
    def feature(self) -> np.ndarray: ...
    @property
    def encoded(self) -> bool: ...


class Tower(Protocol):
    """A ViT: patches float32 [P, patch_dim] and grids -> rows [sum(t*h*w) / merge**2, width]."""

    spatial_merge_size: int

    def __call__(self, pixel_values: torch.Tensor, grid_thw: Sequence[tuple[int, int, int]]) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class VisionEncoderLimits:
    """max_patches: patches per tower call (a single larger item goes alone, a video in parts). cache_bytes: embeddings
    kept."""

    max_patches: int
    cache_bytes: int


class VisionEncoder:
    """Encodes items in packed batches, each content once."""

    def __init__(self, tower: Tower, limits: VisionEncoderLimits, device: torch.device) -> None:
        self._tower = tower
        self._limits = limits
        self._device = device
        self.cache = EmbeddingCache(limits.cache_bytes)
        # Whatever the cache's limit: the next chunk of a picture comes with the next call.
        self._latest: dict[bytes, torch.Tensor] = {}
        self.items_encoded = 0
        self.cache_hits = 0

    def encode(self, items: Sequence[EncodableItem]) -> list[torch.Tensor]:
        """Rows of each item [t*h*w / merge**2, width], in order; equal digests are encoded once.

        An item that came encoded is passed on, and not kept longer than it is used.
        """
        found: dict[bytes, torch.Tensor] = {}
        missing: dict[bytes, EncodableItem] = {}
        for item in items:
            if item.encoded:
                rows = found.get(item.digest, self._latest.get(item.digest))
                found[item.digest] = torch.tensor(item.feature, device=self._device) if rows is None else rows
                continue
            rows = self.cache.get(item.digest)
            if rows is None:
                rows = self._latest.get(item.digest)
            if rows is not None:
                found[item.digest] = rows
                self.cache_hits += 1
            elif item.digest in missing:
                self.cache_hits += 1
            else:
                missing[item.digest] = item
        for batch in self._packed(list(missing.values())):
            for item, rows in zip(batch, self._run(batch), strict=True):
                found[item.digest] = rows
                self.cache.put(item.digest, rows)
        self._latest = found
        return [found[item.digest] for item in items]

    def _packed(self, items: list[EncodableItem]) -> list[list[EncodableItem]]:
        batches: list[list[EncodableItem]] = []
        room = 0
        for item in items:
            patches = int(np.prod(item.grid_thw))
            if not batches or patches > room:
                batches.append([])
                room = self._limits.max_patches
            batches[-1].append(item)
            room -= patches
        return batches

    def _run(self, items: list[EncodableItem]) -> list[torch.Tensor]:
        pixels = torch.from_numpy(np.concatenate([item.feature for item in items]))
        grids = [item.grid_thw for item in items]
        with torch.inference_mode():
            if len(items) == 1:
                rows = self._run_long(pixels, grids[0])
            else:
                rows = self._tower(pixels.to(self._device), grids)
        sizes = [t * h * w // self._tower.spatial_merge_size**2 for t, h, w in grids]
        self.items_encoded += len(items)
        # clones, so that evicting one item of a batch frees its memory
        return [part.clone() for part in rows.split(sizes)] if len(items) > 1 else [rows]

    def _run_long(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """One item, in as many calls as its temporal patches need: towers do not look beyond one."""
        _, h, w = grid
        step = max(1, self._limits.max_patches // (h * w))
        parts = [
            self._tower(part.to(self._device), [(len(part) // (h * w), h, w)]) for part in pixels.split(step * h * w)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
