"""Pictures and videos as temporal patches: what two of them share is known by one key and encoded once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from processors.families.base import MultimodalProcessor, ProcessedMedium, ProcessorLimits
from processors.families.registry import make_processor
from processors.inputs import Modality, MultimodalDataItem
from processors.video.options import VideoKnobs, VideoOptions
from tests.processors.clips import make_clip
from tests.processors.helpers import picture, values
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vision.patches import patches_of
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EmbedShape, EncoderPool, PoolLimits
from vision.towers.blocks import VisionTower
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import temporal_patches
from vision.workers.inline import InlineBackend
from vlmserve_common.checkpoint.fields import read_json

CPU = torch.device("cpu")


@dataclass(frozen=True)
class House:
    """A checkpoint's processor and tower."""

    processor: MultimodalProcessor
    tower: VisionTower

    def pool(self) -> EncoderPool:
        width = self.tower.out_hidden_size * (1 + self.tower.num_deepstack_layers)
        return EncoderPool(
            InlineBackend(TowerRunner(self.tower, CPU)),
            EmbeddingCache(MemoryTier(2**30, CPU)),
            fingerprint=b"tower",
            embed_shape=EmbedShape(merge=2, width=width, dtype=torch.float32),
            limits=PoolLimits(max_patches=10**6, space_bytes=2**30, batches_ahead=1),
        )


@pytest.fixture(scope="module", params=FAMILIES)
def house(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    limits = ProcessorLimits(video_options=VideoOptions(sampling="time-grid"))
    return House(make_processor(folder, read_json(folder, "config.json"), limits), load_tower(folder))


def rows_of(pool: EncoderPool, keys: list[bytes]) -> torch.Tensor:
    while pool.advance() or pool.work(math.inf):
        pass
    return torch.cat([pool.embeds(key) for key in keys])


@torch.inference_mode()
def rows_of_the_tower(house: House, medium: ProcessedMedium) -> torch.Tensor:
    """All of it in one call, main rows and DeepStack rows."""
    return house.tower(torch.from_numpy(values(medium)), [medium.grid_thw])


def test_temporal_patches_are_views_of_a_video_in_order(house):
    video = house.processor.process_video([picture(64, 96, seed) for seed in range(6)])
    patches = patches_of(video)
    assert len(patches) == 3
    assert [patch.digest for patch in patches] == list(video.patch_digests)
    assert {patch.grid for patch in patches} == {video.grid_thw[1:]}
    assert np.array_equal(np.concatenate([patch.pixels for patch in patches]), video.feature)
    assert all(np.shares_memory(patch.pixels, video.feature) for patch in patches)
    assert {patch.num_patches for patch in patches} == {len(video.feature) // 3}
    assert not any(patch.encoded for patch in patches)


def test_two_clips_of_one_file_encode_what_they_share_once(house):
    data = make_clip(60, fps=10, gop=10)
    whole = house.processor.process_video(data)
    part = house.processor.process_video(data, VideoKnobs(video_start=1.7, video_end=4.5))
    shared = set(whole.patch_digests) & set(part.patch_digests)
    assert len(shared) == len(part.patch_digests) == 3
    pool = house.pool()
    keys = pool.submit(patches_of(whole), order=0)
    at = whole.patch_times.index(part.patch_times[0])
    assert pool.submit(patches_of(part), order=1) == keys[at : at + 3]
    together = rows_of(pool, keys)
    assert pool.stats().encoded == len(whole.patch_digests) == len(set(keys))
    assert pool.stats().coalesced == 3
    torch.testing.assert_close(together, rows_of_the_tower(house, whole), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows_of(pool, keys[at : at + 3]), rows_of_the_tower(house, part), rtol=1e-5, atol=1e-5)


def test_rows_that_came_encoded_are_nothing_to_encode():
    rows = np.zeros((6, 8), np.float32)
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        digest=b"d" * 32,
        patch_digests=(b"p" * 32,),
        grid_thw=(1, 4, 6),
        offsets=((0, 6),),
        feature=rows,
        encoded=True,
    )
    [patch] = temporal_patches(item)
    assert (patch.digest, patch.grid, patch.num_patches, patch.encoded) == (b"p" * 32, (4, 6), 0, True)
    assert patch.pixels.shape == (6, 8)
