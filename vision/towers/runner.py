"""Runs a tower on its device: temporal patches in, embeddings out. Keeps nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch.nn.functional import pad

from processors.inputs import Normalization
from processors.normalize import normalize, value_width
from vision.towers.blocks import VisionTower, encoding_cost
from vision.towers.device_resize import original_patches
from vision.towers.grids import kept_patches
from vision.towers.pieces import UNLIMITED, Kind, Piece, PieceLimits, Steps, even_tiles, finish
from vision.towers.temporal_patch import TemporalPatch
from vlmserve_common.checkpoint.adapter_ref import AdapterRef
from vlmserve_common.compute.adapter_store import AdapterStore
from vlmserve_common.compute.transfers import gathered, to_device

# Patches whose values are made together on a CPU.
_VALUE_ROWS = 512


class TowerRunner:
    """A tower and its device. behind: a tower for the same values, whose embeddings lie behind the first one's.
    adapters: those that may change the first tower."""

    def __init__(
        self, tower: VisionTower, device: torch.device, *behind: VisionTower, adapters: AdapterStore | None = None
    ) -> None:
        self._towers = (tower, *behind)
        self._adapters = adapters
        self._device = device

    @torch.inference_mode()
    def encode(self, patches: Sequence[TemporalPatch]) -> tuple[torch.Tensor, ...]:
        """Return the embeddings [h * w / merge**2, width] of each temporal patch in the tower's dtype, from one call of
        the tower.

        Each has memory of its own, so that dropping one frees it. Raises as `encode_packed` does.
        """
        return finish(self.steps(patches, UNLIMITED))

    @torch.inference_mode()
    def encode_packed(self, patches: Sequence[TemporalPatch]) -> torch.Tensor:
        """Return the embeddings of one or more temporal patches in a row: [sum of h * w / merge**2, width] on the
        tower's device.

        Raises ValueError as `pixel_values` and `VisionTower.forward` do.
        """
        return finish(self._packed_steps(patches, UNLIMITED))

    def steps(self, patches: Sequence[TemporalPatch], limits: PieceLimits) -> Steps[tuple[torch.Tensor, ...]]:
        """Run `encode` in pieces; see `vision.towers.pieces`."""
        packed = yield from self._packed_steps(patches, limits)
        if len(patches) == 1:
            return (packed,)
        return tuple(embeds.clone() for embeds in packed.split(self.row_counts(patches)))

    def _packed_steps(self, patches: Sequence[TemporalPatch], limits: PieceLimits) -> Steps[torch.Tensor]:
        if any(patch.sound for patch in patches):
            return (yield from self._mixed_steps(patches, limits))
        values = yield from _value_steps(patches, self._device)
        grids, merge = [(1, *patch.grid) for patch in patches], self._towers[0].spatial_merge_size
        kept = kept_patches([(patch.kept, patch.rows(merge)) for patch in patches], merge)
        return (yield from self._side_by_side(lambda tower: tower.steps(values, grids, limits, kept), patches))

    def _mixed_steps(self, patches: Sequence[TemporalPatch], limits: PieceLimits) -> Steps[torch.Tensor]:
        """Encode a batch with parts of sounds. Zeros stand in the place of DeepStack's columns."""
        sounds, others = ([patch for patch in patches if patch.sound is kind] for kind in (True, False))
        counts = self.row_counts(sounds)

        def hear(tower: VisionTower) -> Steps[torch.Tensor]:
            assert tower.ears is not None, "a sound, and no tower for it"
            heard = yield from tower.ears.steps(sounds, counts, limits)
            return pad(heard, (0, tower.row_width - heard.shape[1]))

        together = yield from self._side_by_side(hear, patches)
        rows = iter(together.split(counts))
        if not others:
            return torch.cat(list(rows))
        packed = yield from self._packed_steps(others, limits)
        seen = iter(packed.split(self.row_counts(others)))
        return torch.cat([next(rows if patch.sound else seen) for patch in patches])

    def _side_by_side(
        self, steps_of: Callable[[VisionTower], Steps[torch.Tensor]], patches: Sequence[TemporalPatch]
    ) -> Steps[torch.Tensor]:
        """Run steps of every tower, those of the first one with the adapter; return their embeddings side by side."""
        parts = list[torch.Tensor]()
        for tower in self._towers:
            steps = steps_of(tower)
            if not parts and patches[0].adapter is not None:
                steps = self._changed(steps, patches[0].adapter)
            embeds = yield from steps
            parts.append(embeds)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _changed(self, steps: Steps[torch.Tensor], ref: AdapterRef) -> Steps[torch.Tensor]:
        """Run the first tower's steps with an adapter. Between them, other work has its own."""
        assert self._adapters is not None, "an adapter, and no store of adapters"
        adapter = self._adapters.get(ref)
        while True:
            with self._adapters.active.use([(adapter, 1)]):
                try:
                    piece = next(steps)
                except StopIteration as end:
                    embeds: torch.Tensor = end.value
                    return embeds
            yield piece

    def cost(self, patches: Sequence[TemporalPatch]) -> Mapping[Kind, float]:
        """Return the approximate cost of the pieces of `steps`."""
        total: dict[Kind, float] = {}
        for patch in patches:
            for tower in self._towers:
                if patch.sound and tower.ears is not None:
                    costs: Mapping[Kind, float] = {Kind.PRODUCT: tower.ears.part_flops(len(patch.pixels))}
                else:
                    costs = encoding_cost(tower, patch.num_patches)
                for kind, cost in costs.items():
                    total[kind] = total.get(kind, 0.0) + cost
        return total

    def row_counts(self, patches: Sequence[TemporalPatch]) -> list[int]:
        """Return how many embeddings each temporal patch has."""
        return [patch.rows(self._towers[0].spatial_merge_size) for patch in patches]


def pixel_values(patches: Sequence[TemporalPatch], device: torch.device) -> torch.Tensor:
    """Return the input of a tower for one or more temporal patches: float32 [P, patch elements], in a row.

    Raises ValueError if pixels do not fit their grid, or differ in width.
    """
    return finish(_value_steps(patches, device))


def _value_steps(patches: Sequence[TemporalPatch], device: torch.device) -> Steps[torch.Tensor]:
    for patch in patches:
        if patch.resizing is None and len(patch.pixels) != patch.num_patches:
            raise ValueError(
                f"a temporal patch of grid {patch.grid} has {patch.num_patches} patches, not {len(patch.pixels)}"
            )
    widths = {_value_width(patch) for patch in patches}
    if len(widths) > 1:
        raise ValueError(f"the patches of a batch have {sorted(widths)} values: they are not of one tower")
    values = torch.empty(sum(patch.num_patches for patch in patches), widths.pop(), dtype=torch.float32, device=device)
    done = 0
    for (normalization, _), group in groupby(patches, key=_kind):  # nearly always one or two
        pixels = yield from _pixel_steps(list(group), device)
        for rows in even_tiles(len(pixels), _VALUE_ROWS if values.is_cpu else len(pixels)):
            target = values[done + rows.start : done + rows.stop]
            yield Piece(Kind.ELEMENTS, target.numel())
            normalize(pixels[rows], normalization, target)
        done += len(pixels)
    return values


def _kind(patch: TemporalPatch) -> tuple[Normalization, tuple[object, ...] | None]:
    """Return properties that patches must share to become values together."""
    originals = None if patch.resizing is None else (patch.resizing, patch.grid, patch.pixels.shape)
    return _normalization(patch), originals


def _pixel_steps(patches: Sequence[TemporalPatch], device: torch.device) -> Steps[np.ndarray | torch.Tensor]:
    """Return the patches of one kind in a row, on the device where they are made."""
    resizing, grid = patches[0].resizing, patches[0].grid
    if resizing is None:
        return gathered([patch.pixels for patch in patches], device)
    frames = gathered([patch.pixels[None] for patch in patches], device)
    yield Piece(Kind.ELEMENTS, frames.size)
    return original_patches(to_device(torch.from_numpy(frames), device), grid, resizing)


def _value_width(patch: TemporalPatch) -> int:
    if patch.resizing is None:
        return value_width(patch.pixels, _normalization(patch))
    frames, *_, channels = patch.pixels.shape
    return frames * channels * patch.resizing.patch_size**2 * _normalization(patch).repeat


def _normalization(patch: TemporalPatch) -> Normalization:
    if patch.normalization is None:
        raise ValueError(f"a temporal patch of grid {patch.grid} does not say how its pixels become values")
    return patch.normalization
