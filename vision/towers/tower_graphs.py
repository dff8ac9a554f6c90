"""A tower's layers captured as CUDA graphs for a few numbers of patches, and replayed at the next larger one."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from vision.towers.blocks import VisionTower
from vision.towers.grids import LayerInputs, Segments, StaticSegments
from vision.towers.pieces import UNLIMITED, finish
from vlmserve_common.compute.graphs import Capturer, CudaCapturer, Graph
from vlmserve_common.compute.memory import free_memory, show_gib
from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.errors import first_line
from vlmserve_common.kernels.fused import gpu_kernels_work

BUCKETS = (256, 512, 768, 1024, 1536, 2048)
"""Numbers of patches.

About ten kernels a layer are launched, however few patches there are, in a few milliseconds. In towers of the published
sizes computing takes longer than that from about 2048 patches on. From 256 patches on, padding is at most a third.
"""

MakeSegments = Callable[[int, int], StaticSegments]
"""(patches of a bucket, patches of its longest segment) -> memory for segments."""


# Tiles of a bucket: one for so many patches. Windows of 64 patches need one each, and up to four times as many where
# a picture is narrower than they are. A tile that is not needed does nothing.
_PATCHES_OF_A_TILE = 16
log = logging.getLogger(__name__)


class CapturedTower:
    """All blocks and mergers, captured. Data that depend on grids are computed before, and copied into static memory.

    There is one set of buffers, of the largest bucket, since batches are encoded one after the other. Raises
    RuntimeError as `Capturer.capture` does.
    """

    @torch.inference_mode()
    def __init__(
        self,
        tower: VisionTower,
        buckets: Sequence[int],
        *,
        make_segments: MakeSegments,
        capturer: Capturer,
    ) -> None:
        self._tower = tower
        self._joined = tower.spatial_merge_size**2
        self.buckets = tuple(sorted({-(-bucket // self._joined) * self._joined for bucket in buckets}))
        most, weight = self.buckets[-1], next(tower.parameters())
        embeds = tower.row_width
        self._x = torch.zeros(most, tower.patch_embed.width, dtype=weight.dtype, device=weight.device)
        self._rotary = torch.zeros(2, most, 1, tower.head_dim, device=weight.device)
        self._out = torch.zeros(most // self._joined, embeds, dtype=weight.dtype, device=weight.device)
        self._graphs: dict[int, tuple[LayerInputs, Graph]] = {}
        for bucket in reversed(self.buckets):  # the largest first; see `Capturer`
            self._graphs[bucket] = self._captured(bucket, make_segments, capturer)

    def _captured(self, bucket: int, make_segments: MakeSegments, capturer: Capturer) -> tuple[LayerInputs, Graph]:
        windows = (self._tower.window_patches,) if self._tower.window_patches else ()
        cos, sin = self._rotary[:, :bucket]
        segments = tuple(make_segments(bucket, longest) for longest in (bucket, *windows))
        inputs = LayerInputs(x=self._x[:bucket], rotary=(cos, sin), segments=segments)

        def run() -> None:
            embeds = finish(self._tower.layer_steps(inputs, UNLIMITED))
            # copied, so that the graphs need not keep an output each
            self._out[: len(embeds)].copy_(embeds)

        return inputs, capturer.capture(run)

    def fits(self, inputs: LayerInputs) -> bool:
        """Return True if there is a graph for these inputs."""
        if len(inputs.x) > self.buckets[-1]:
            return False
        static, _ = self._graphs[self._bucket(inputs)]
        return all(one.fits(segments) for one, segments in _pairs(static, inputs))

    @torch.inference_mode()
    def run(self, inputs: LayerInputs) -> torch.Tensor:
        """Run `VisionTower.layer_steps` by a graph. The embeddings have memory of their own."""
        static, graph = self._graphs[self._bucket(inputs)]
        count = len(inputs.x)
        self._x[:count].copy_(inputs.x, non_blocking=True)
        torch._foreach_copy_([part[:count] for part in self._rotary], list(inputs.rotary))
        for one, segments in _pairs(static, inputs):
            one.load(segments)
        graph.replay()
        return self._out[: count // self._joined].clone()

    def _bucket(self, inputs: LayerInputs) -> int:
        return self.buckets[bisect_left(self.buckets, len(inputs.x))]


def _pairs(static: LayerInputs, inputs: LayerInputs) -> list[tuple[StaticSegments, Segments]]:
    """Pair the static segments of each kind with the new ones."""
    return [
        (one, other)
        for one, other in zip(static.segments, inputs.segments, strict=True)
        if isinstance(one, StaticSegments) and isinstance(other, Segments)
    ]


class TiledSegments(StaticSegments):
    """Segments for the GPU attention kernel: tiles of queries, in a tensor of constant length.

    `patches`: of the bucket. `longest`: most patches of a segment.
    """

    def __init__(self, patches: int, longest: int, *, dtype: torch.dtype, device: torch.device) -> None:
        from vlmserve_common.kernels.gpu.segments import tile_rows

        self._rows = tile_rows(dtype, longest)
        self._tiles = torch.zeros(-(-patches // _PATCHES_OF_A_TILE), 3, dtype=torch.int32, device=device)

    def fits(self, segments: Segments) -> bool:
        return sum(-(-length // self._rows) for length in segments.lengths) <= len(self._tiles)

    def load(self, segments: Segments) -> None:
        tiles = segments.tiles(self._rows)
        self._tiles[: len(tiles)].copy_(tiles)
        self._tiles[len(tiles) :].zero_()

    def attend(self, qkv: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        from vlmserve_common.kernels.gpu.segments import segment_attention, turn

        turn(qkv, *rotary)
        return segment_attention(qkv, self._tiles, self._rows)


def capture_on_gpu(tower: VisionTower, device: torch.device) -> None:
    """Capture the layers of a tower on a GPU. Call it before the KV cache is sized by the memory that is left.

    Nothing is captured if attention is torch's.
    """
    dtype = next(tower.parameters()).dtype
    if not gpu_kernels_work(device, dtype, tower.head_dim):
        return

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
    """Capture a tower's layers for each number of patches in `buckets`. If that fails, log it and go without graphs.

    `free`: returns the free bytes of memory.
    """
    before, began = free(), time.perf_counter()
    try:
        graphs = CapturedTower(tower, buckets, make_segments=make_segments, capturer=capturer)
    except Exception as error:  # a compiler's, too: without graphs it is slower, and that is all
        log.warning("the vision tower is not captured as CUDA graphs: %s", first_line(error))
        return
    tower.attach_graphs(graphs)
    log.info(
        "captured the vision tower's layers for %s patches (%d CUDA graphs) in %.1f s; they take %s",
        ", ".join(map(str, graphs.buckets)),
        len(graphs.buckets),
        time.perf_counter() - began,
        show_gib(max(0, before - free())),
    )
