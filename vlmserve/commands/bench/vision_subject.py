"""A checkpoint's vision tower on a device, with its processor and encoder pools, to be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import wait
from pathlib import Path

import torch

from processors.families.base import MultimodalProcessor, ProcessorLimits, data_item
from processors.families.registry import make_processor
from processors.image.decoding import decode_image
from processors.video.options import VideoKnobs, VideoLimits, VideoOptions
from vision.cache.disk_tier import DiskTier
from vision.encoder_pool import EncoderPool, PoolLimits
from vision.towers.blocks import VisionTower
from vision.towers.grids import Grid
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vision.workers.inline import InlineBackend
from vlmserve.commands.bench.gpu.shapes import VISION_SIZES
from vlmserve.commands.bench.media import jpeg
from vlmserve.commands.bench.processor_reference import write_settings
from vlmserve.commands.bench.random_checkpoint import write_random_checkpoint
from vlmserve.engine.encoder import embed_shape, make_cache
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.library import activate

PLENTY = 1 << 40
"""A limit in bytes that is never met."""
_FINGERPRINT = bytes(32)
# The decoder is as wide as the rows and otherwise tiny: it is stored with the tower and not used.
_TEXT_SIZES = {"num_hidden_layers": 3, "hidden_size": 2048, "intermediate_size": 256}


def write_checkpoint(folder: Path, *, depth: int) -> Path:
    """Write a tower of `depth` layers like Qwen3-VL-2B's (which has 24) with random weights, and published settings."""
    sizes = VISION_SIZES | {
        "depth": depth,
        "out_hidden_size": _TEXT_SIZES["hidden_size"],
        "deepstack_visual_indexes": sorted({max(0, depth * part // 4 - 1) for part in (1, 2, 3)}),
    }
    write_random_checkpoint(folder, text_sizes=_TEXT_SIZES, vision_sizes=sizes)
    write_settings(folder, "qwen3_vl")
    return folder


def use_threads(device: torch.device, threads: int) -> str:
    """Let this process compute with `threads` threads; return what computes, for people."""
    torch.set_num_threads(threads)
    return activate("auto", threads=threads) if device.type == "cpu" else fused.activate("auto", device)


class TowerSubject:
    """The tower of a checkpoint folder in `dtype` on `device`, and its processor."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self.tower: VisionTower = load_tower(folder, device=device, dtype=dtype)
        pack_linears(self.tower)
        self.runner = TowerRunner(self.tower, device)
        limits = ProcessorLimits(
            video=VideoLimits(decode_threads=1), video_options=VideoOptions(sampling="time-grid", fps=2.0)
        )
        self.processor: MultimodalProcessor = make_processor(folder, read_hf_config(folder), limits)

    def picture(self, width: int, height: int, *, seed: int = 0) -> tuple[TemporalPatch, ...]:
        """Return a JPEG file, processed."""
        image = decode_image(jpeg(width, height, seed), self.processor.limits.decode)
        return temporal_patches(data_item(self.processor.process_image(image)))

    def clip(self, data: bytes, knobs: VideoKnobs) -> tuple[TemporalPatch, ...]:
        """Return a part of a video file on the time grid at two frames a second, processed."""
        return temporal_patches(data_item(self.processor.process_video(data, knobs)))

    def pool(
        self,
        *,
        device_bytes: int,
        host_bytes: int = 0,
        max_patches: int,
        disk: DiskTier | None = None,
    ) -> closing[EncoderPool]:
        """Return an encoder pool that its context closes.

        `device_bytes` and `host_bytes` are room for rows that are not in use. A batch has `max_patches` at the most.
        """
        return closing(
            EncoderPool(
                InlineBackend(self.runner),
                make_cache(self.device, device_bytes=device_bytes, host_bytes=host_bytes),
                fingerprint=_FINGERPRINT,
                embed_shape=embed_shape(self.tower, self.dtype),
                limits=PoolLimits(max_patches=max_patches, space_bytes=PLENTY),
                disk=disk,
            )
        )


def grid_thw(medium: Sequence[TemporalPatch]) -> Grid:
    """Return the patches of a medium in time, height and width."""
    return len(medium), *medium[0].grid


def finish(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_rows(pool: EncoderPool, patches: Sequence[TemporalPatch]) -> list[torch.Tensor]:
    """Return the rows of temporal patches as a request gets them: held, waited for, taken and released."""
    keys = pool.submit(patches, order=0)
    while not all(map(pool.is_ready, keys)):
        if not pool.advance() and not pool.work(math.inf):
            wait(pool.wait_handles())
        failures = pool.take_failures()
        if failures:
            raise RuntimeError(f"not encoded: {', '.join(failures.values())}")
    rows = [pool.embeds(key) for key in keys]
    pool.release(keys, order=0)
    return rows


def settle(pool: EncoderPool) -> None:
    """Wait until the pool is idle, so that all rows are on the disk."""
    while pool.busy:
        if not pool.advance() and not pool.work(math.inf):
            wait(pool.wait_handles())
