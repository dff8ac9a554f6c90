"""Copies of KV: between the device and the host, and on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.kv_storage import KVStorage
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.kernels.attention import CacheLayer

STAGED_BYTES = 64 * 2**20
"""The most bytes of a piece of a copy, so that its memory beside the pools stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCopyJob:
    """Copy the KV of n tokens, over all layers. host_slots, device_slots, to_slots: int64 [n].

    to_host, to_device: between host_slots and device_slots. to_storage: from host_slots, or from device_slots if there
    are none, to the file of `pages`, their digests. from_storage: from `rows` uint8 [n, bytes_per_token], which were
    read, to host_slots. on_device: from device_slots to to_slots.
    """

    direction: Literal["to_host", "to_device", "to_storage", "from_storage", "on_device"]
    host_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    to_slots: np.ndarray | None = None
    device_slots: np.ndarray | None = None
    pages: tuple[bytes, ...] = ()
    rows: torch.Tensor | None = None


class KVTransfer:
    """KV of all layers by slot in host memory, rows uint8 [host_slots, bytes_per_token], and the copies between it, the
    device, and storage.

    A token's bytes lie side by side, so a run of slots is one copy. If there is a GPU, the memory is page-locked, so
    copies need no detour. Host slots are those of a `TokenToKVPoolAllocator`, with its dummy page.

    Does copy jobs on the thread and the stream of the model. A job sees the results of work launched before it, and
    work launched after it sees the job's. No thread waits.

    rows: the memory. storage: gets the jobs to and from the disk. piece_tokens: longer copies go in pieces of so many
    tokens.
    """

    def __init__(self, kv_cache: KVCache, host_slots: int, storage: KVStorage | None = None) -> None:
        self.host_slots, self.storage = host_slots, storage
        self._parts = _parts(kv_cache.layers)
        self._device = self._parts[0].device
        width = sum(part.shape[1] for part in self._parts)
        # cleared, so that the memory is committed now
        self.rows = torch.zeros(
            (host_slots, width), dtype=torch.uint8, pin_memory=host_slots > 0 and self._device.type == "cuda"
        )
        self.piece_tokens = max(1, STAGED_BYTES // width)

    @torch.inference_mode()
    def run(self, jobs: Iterable[KVCopyJob]) -> None:
        """Do jobs in their order."""
        for job in jobs:
            if job.direction == "to_storage":
                self._store(job)
                continue
            if job.direction == "from_storage":
                assert job.rows is not None
                self._finish_copies()
                self.rows.index_copy_(0, torch.from_numpy(job.host_slots.copy()), job.rows)
                continue
            assert job.device_slots is not None
            if job.to_slots is not None:
                sources, targets = (
                    torch.tensor(slots, device=self._device) for slots in (job.device_slots, job.to_slots)
                )
                for part in self._parts:
                    part.index_copy_(0, targets, part.index_select(0, sources))
                continue
            copy = self._to_host if job.direction == "to_host" else self._to_device
            for start in range(0, len(job.host_slots), self.piece_tokens):
                piece = slice(start, start + self.piece_tokens)
                copy(to_device(torch.tensor(job.device_slots[piece]), self._device), job.host_slots[piece])

    def _store(self, job: KVCopyJob) -> None:
        assert self.storage is not None
        if job.device_slots is not None:
            slots = torch.tensor(job.device_slots, device=self._device)
            rows = torch.cat([part.index_select(0, slots) for part in self._parts], dim=1).cpu()
        else:
            self._finish_copies()
            rows = self.rows.index_select(0, torch.from_numpy(job.host_slots.copy()))
        self.storage.save(list(job.pages), rows)

    def _finish_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _to_host(self, device_slots: torch.Tensor, host_slots: np.ndarray) -> None:
        staged = torch.cat([part.index_select(0, device_slots) for part in self._parts], dim=1)
        for start, end in _runs(host_slots):
            first = int(host_slots[start])
            self.rows[first : first + end - start].copy_(staged[start:end], non_blocking=True)

    def _to_device(self, device_slots: torch.Tensor, host_slots: np.ndarray) -> None:
        staged = torch.empty((len(host_slots), self.rows.shape[1]), dtype=torch.uint8, device=self._device)
        for start, end in _runs(host_slots):
            first = int(host_slots[start])
            staged[start:end].copy_(self.rows[first : first + end - start], non_blocking=True)
        widths = [part.shape[1] for part in self._parts]
        for part, values in zip(self._parts, staged.split(widths, dim=1), strict=True):
            part.index_copy_(0, device_slots, values)


def _parts(layers: Iterable[CacheLayer]) -> list[torch.Tensor]:
    """Return all tensors of a cache as bytes [num_slots, n], in its own memory."""
    return [
        tensor.view(torch.uint8).flatten(1)
        for layer in layers
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        if tensor is not None
    ]


def _runs(slots: np.ndarray) -> list[tuple[int, int]]:
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    bounds = [0, *cuts.tolist(), len(slots)]
    return list(itertools.pairwise(bounds))
