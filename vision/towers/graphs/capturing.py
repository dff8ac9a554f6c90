"""Gives a tower its graphs, if these can be had."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from vision.towers.blocks import VisionTower
from vision.towers.graphs.tower_graphs import BUCKETS, CapturedTower, MakeSegments
from vlmserve_common.compute.graphs import Capturer, CudaCapturer
from vlmserve_common.compute.memory import free_memory, show_gib
from vlmserve_common.kernels.fused import gpu_kernels_work

log = logging.getLogger(__name__)


def capture_on_gpu(tower: VisionTower, device: torch.device) -> None:
    """Capture the layers of a tower that is on a GPU. Call it before a KV cache is sized by what memory is left. Where
    attention is torch's, nothing is captured."""
    dtype = next(tower.parameters()).dtype
    if not gpu_kernels_work(device, dtype, tower.head_dim):
        return
    from vision.towers.graphs.tiled_segments import TiledSegments

    def make_segments(patches: int, longest: int) -> TiledSegments:
        return TiledSegments(patches, longest, dtype=dtype, device=device)

    def free() -> int:
        torch.cuda.synchronize(device)
        return free_memory(device)[0]

    capture_tower(tower, make_segments=make_segments, capturer=CudaCapturer(device), free=free)


def capture_tower(
    tower: VisionTower,
    *,
    make_segments: MakeSegments,
    capturer: Capturer,
    free: Callable[[], int],
    buckets: Sequence[int] = BUCKETS,
) -> None:
    """Capture a tower's layers for so many patches; without graphs, and with a line in the log, where that fails. free:
    bytes of memory."""
    before, began = free(), time.perf_counter()
    try:
        graphs = CapturedTower(tower, buckets, make_segments=make_segments, capturer=capturer)
    except Exception as error:  # a compiler's, too: without graphs it is slower, and that is all
        log.warning("the vision tower is not captured as CUDA graphs: %s", str(error).split("\n")[0])
        return
    tower.attach_graphs(graphs)
    log.info(
        "captured the vision tower's layers for %s patches (%d CUDA graphs) in %.1f s; they take %s",
        ", ".join(map(str, graphs.buckets)),
        len(graphs.buckets),
        time.perf_counter() - began,
        show_gib(max(0, before - free())),
    )
