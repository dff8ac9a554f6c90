"""Where rows are kept: on the device, in the host's memory behind it, and on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from tests.vision.patches import random_patches
from vision.cache.disk_tier import DiskTier
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.cache.store import EmbeddingStore
from vision.encoder_pool import EncoderPool, PoolLimits
from vision.towers.blocks import VisionTower
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.workers.inline import InlineBackend
from vlmserve.commands.bench.vision import PLENTY, settle, take_rows
from vlmserve.engine.encoder import embed_shape

FINGERPRINT = bytes(32)


@pytest.fixture(scope="module")
def tower(folder: Path, device: torch.device) -> VisionTower:
    return load_tower(folder, device=device)


@contextmanager
def pool(
    tower: VisionTower, device: torch.device, *, device_bytes: int, host_bytes: int = 0, disk: Path | None = None
) -> Iterator[EncoderPool]:
    """Not by `make_cache`, which has no host's memory behind that of a CPU."""
    store = None
    if disk is not None:
        store = EmbeddingStore(disk, fingerprint=FINGERPRINT, limit_bytes=PLENTY, about={})
    made = EncoderPool(
        InlineBackend(TowerRunner(tower, device)),
        EmbeddingCache(
            MemoryTier(device_bytes, device), MemoryTier(host_bytes, torch.device("cpu")) if host_bytes else None
        ),
        fingerprint=FINGERPRINT,
        embed_shape=embed_shape(tower, torch.float32),
        limits=PoolLimits(max_patches=1000, space_bytes=PLENTY),
        disk=None if store is None else DiskTier(store),
    )
    with closing(made):
        yield made


def test_rows_found_on_the_device_are_those_that_were_encoded(tower, device):
    patches = random_patches(tower)
    with pool(tower, device, device_bytes=PLENTY) as one:
        first = [rows.clone() for rows in take_rows(one, patches)]
        again = take_rows(one, patches)
        assert one.stats().encoded == len(patches)
        assert one.stats().device.hits == len(patches)
        for a, b in zip(first, again, strict=True):
            assert b.device.type == device.type
            assert torch.equal(a, b)


def test_what_the_device_gives_up_comes_back_from_the_host(tower, device):
    patches = random_patches(tower)
    with pool(tower, device, device_bytes=0, host_bytes=PLENTY) as one:
        first = [rows.clone() for rows in take_rows(one, patches)]
        assert one.stats().device.entries == 0
        assert one.stats().host.entries == len(patches)
        again = take_rows(one, patches)
        assert one.stats().encoded == len(patches)
        assert one.stats().host.hits == len(patches)
        for a, b in zip(first, again, strict=True):
            assert b.device.type == device.type
            assert torch.equal(a, b)


def test_rows_come_back_from_the_disk(tower, device, tmp_path):
    patches = random_patches(tower)
    with pool(tower, device, device_bytes=PLENTY, disk=tmp_path) as one:
        first = take_rows(one, patches)
        settle(one)
        assert one.stats().saved == len(patches)
    with pool(tower, device, device_bytes=PLENTY, disk=tmp_path) as other:
        again = take_rows(other, patches)
        assert other.stats().encoded == 0
        for a, b in zip(first, again, strict=True):
            assert b.device.type == device.type
            assert torch.equal(a, b)


def test_rows_that_leave_the_device_while_they_are_written_are_written_whole(tower, device, tmp_path):
    """Nothing is kept on the device: its memory is used again while the writer still copies."""
    patches = random_patches(tower, [(16, 16)] * 24)
    with pool(tower, device, device_bytes=0, disk=tmp_path) as one:
        first = [rows.cpu() for patch in patches for rows in take_rows(one, [patch])]
        settle(one)
    with pool(tower, device, device_bytes=PLENTY, disk=tmp_path) as other:
        again = take_rows(other, patches)
        assert other.stats().encoded == 0
        assert all(torch.equal(a, b.cpu()) for a, b in zip(first, again, strict=True))
