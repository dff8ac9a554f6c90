"""The pool and a backend in slices: what nobody waits for any more is cancelled; work and estimates pass through."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.tiny_checkpoints import make_checkpoint
from tests.vision.fake_backend import FakeBackend, make_pool
from tests.vision.patches import random_patches
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EmbedShape, EncoderPool, PoolLimits
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import TemporalPatch
from vision.workers.inline import InlineBackend

CPU = torch.device("cpu")


def content(name: str) -> TemporalPatch:
    return TemporalPatch(digest=name.encode() * 32, grid=(2, 4), pixels=np.zeros((8, 1)))


def test_a_batch_is_cancelled_when_the_last_of_its_entries_is_released():
    backend = FakeBackend(inline=False, cancels=True)
    pool = make_pool(backend)
    first = pool.submit([content("a"), content("b")], order=0)
    also = pool.submit([content("b")], order=1)
    pool.advance()
    pool.release(first, order=0)
    assert backend.cancelled == [], "somebody waits for b"
    pool.release(also, order=1)
    assert backend.cancelled == [1]
    assert pool.busy
    assert pool.advance()
    assert not pool.busy
    stats = pool.stats()
    assert (stats.queued, stats.under_way, stats.retried, stats.failed, stats.device.held_bytes) == (0, 0, 0, 0, 0)


def test_who_comes_after_it_was_cancelled_gets_it_all_the_same_and_it_was_not_tried():
    backend = FakeBackend(inline=False, cancels=True)
    pool = make_pool(backend)
    pool.release(pool.submit([content("a")], order=0), order=0)
    keys = pool.submit([content("b")], order=0)
    pool.advance()
    pool.release(keys, order=0)
    assert backend.cancelled == [1]
    again = pool.submit([content("b")], order=1)
    backend.fail[content("b").digest] = 1
    pool.advance()
    backend.finish()
    pool.advance()
    assert pool.take_failures() == {}, "one failure is tried again"
    backend.finish()
    pool.advance()
    assert pool.is_ready(again[0])
    pool.release(again, order=1)


def test_a_worker_that_cannot_cancel_ends_the_batch_and_it_is_kept():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend)
    keys = pool.submit([content("a")], order=0)
    pool.advance()
    pool.release(keys, order=0)
    backend.finish()
    pool.advance()
    assert pool.is_ready(pool.submit([content("a")], order=1)[0]) or pool.advance()
    assert backend.encoded() == [content("a").digest]


def test_an_inline_pool_encodes_when_it_is_told_to(tmp_path):
    tower = load_tower(make_checkpoint("qwen3_vl", tmp_path))
    cache = EmbeddingCache(MemoryTier(2**30, CPU))
    shape = EmbedShape(merge=2, width=tower.out_hidden_size * (1 + tower.num_deepstack_layers), dtype=torch.float32)
    limits = PoolLimits(max_patches=64, space_bytes=2**30)
    backend = InlineBackend(TowerRunner(tower, CPU))
    pool = EncoderPool(backend, cache, fingerprint=b"tower", embed_shape=shape, limits=limits)
    patches = random_patches(tower)
    keys = pool.submit(patches, order=0)
    assert not pool.has_work
    assert pool.advance()
    assert pool.has_work
    assert pool.work(0.0)
    assert not any(map(pool.is_ready, keys))
    pool.release(keys[1:], order=0, place=1)
    while pool.advance() or pool.work(math.inf):
        pass
    assert pool.is_ready(keys[0])
    assert not pool.has_work
    assert pool.stats().patches_encoded < sum(patch.num_patches for patch in patches), "the others were given up"
    pool.release(keys[:1], order=0)
    pool.close()
