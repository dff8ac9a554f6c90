"""A tower's layers captured for a few numbers of patches, and replayed at the next larger one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from vision.towers.blocks import VisionTower
from vision.towers.grids import Segments
from vision.towers.layer_inputs import LayerInputs, StaticSegments
from vision.towers.pieces import UNLIMITED, finish
from vlmserve_common.compute.graphs import Capturer, Graph

BUCKETS = (256, 512, 768, 1024, 1536, 2048)
"""Patches. About ten kernels a layer are launched however few patches there are, in a few milliseconds; computing takes
longer than that from about 2048 patches on, in towers of the published sizes. Padding is a third at the most, from 256
patches on."""

MakeSegments = Callable[[int, int], StaticSegments]
"""Patches of a bucket, and those of the longest segment in it -> memory for segments."""


class CapturedTower:
    """All blocks and mergers. What depends on grids is worked out before, and copied into static memory.

    There is one set of buffers, of the largest bucket: batches are encoded one after the other. RuntimeError as
    `Capturer.capture` raises it.
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
        embeds = tower.out_hidden_size * (1 + tower.num_deepstack_layers)
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
        """See `vision.towers.blocks.TowerGraphs`."""
        if len(inputs.x) > self.buckets[-1]:
            return False
        static, _ = self._graphs[self._bucket(inputs)]
        return all(one.fits(segments) for one, segments in _pairs(static, inputs))

    @torch.inference_mode()
    def run(self, inputs: LayerInputs) -> torch.Tensor:
        """See `vision.towers.blocks.TowerGraphs`. Embeddings in memory of their own."""
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
    """Of each kind: the static ones, and those that they are to be."""
    return [
        (one, other)
        for one, other in zip(static.segments, inputs.segments, strict=True)
        if isinstance(one, StaticSegments) and isinstance(other, Segments)
    ]
