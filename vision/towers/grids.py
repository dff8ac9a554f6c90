"""The inputs of a tower's layers, from the grids it encodes: positions, attention segments and windows.

An item's patches go frame by frame. Within a frame they go by blocks of merge x merge (rows of blocks, blocks of a row,
rows of a block, patches of a row). So the patches of one embedding are contiguous. Tensors are on the CPU unless noted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.compute.transfers import to_device

Grid = tuple[int, int, int]


def check_grids(grids: Sequence[Grid], num_patches: int, merge: int, kept: torch.Tensor | None = None) -> None:
    """Raise ValueError unless the grids (t, h, w) are mergeable and have `num_patches` patches together. `kept`: as of
    `kept_patches`."""
    for t, h, w in grids:
        if t < 1 or h < merge or w < merge or h % merge or w % merge:
            raise ValueError(f"grid {(t, h, w)}: t must be 1 or more, h and w positive multiples of {merge}")
    total = sum(t * h * w for t, h, w in grids)
    if kept is not None:
        if total != len(kept):
            raise ValueError(f"the grids have {total} patches, and {len(kept)} were chosen from")
        total = int(kept.sum())
    if total != num_patches:
        raise ValueError(f"the grids have {total} patches, and there are {num_patches} rows of pixels")


def kept_patches(parts: Sequence[tuple[bytes, int]], merge: int) -> torch.Tensor | None:
    """Return which patches of a packed batch are there: bool, in the order of its grids; None if all are.

    `parts`: of each temporal patch, a byte for each token, or b"" for all, and the number of tokens.
    """
    if not any(kept for kept, _ in parts):
        return None
    tokens = b"".join(kept or b"\1" * count for kept, count in parts)
    return torch.frombuffer(bytearray(tokens), dtype=torch.bool).repeat_interleave(merge**2)


def patch_coordinates(grids: Iterable[Grid], merge: int, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return int64 [2, P]: row and column of every patch in its frame. `kept`: as of `kept_patches`."""
    parts = []
    for t, h, w in grids:
        rows = torch.arange(h)[:, None].expand(h, w)
        columns = torch.arange(w).expand(h, w)
        blocks = torch.stack((rows, columns)).view(2, h // merge, merge, w // merge, merge)
        parts.append(blocks.transpose(2, 3).reshape(2, h * w).repeat(1, t))
    coordinates = torch.cat(parts, dim=1)
    return coordinates if kept is None else coordinates[:, kept]


def interpolation(
    grids: Iterable[Grid], merge: int, side: int, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resample a [side * side] table of positions to every grid, bilinear, corners aligned.

    Returns table rows int64 [P, 4] and their weights float32 [P, 4] for the four neighbours, as transformers'
    `get_vision_interpolation_indices_and_weights` does. `kept`: as of `kept_patches`.
    """
    rows, weights = [], []
    for t, h, w in grids:
        y_taps, y_weights = _axis_taps(h, side)
        x_taps, x_weights = _axis_taps(w, side)
        y, x = patch_coordinates([(1, h, w)], merge)
        table_rows = y_taps[y][:, :, None] * side + x_taps[x][:, None, :]
        products = y_weights[y][:, :, None] * x_weights[x][:, None, :]
        rows.append(table_rows.reshape(-1, 4).repeat(t, 1))
        weights.append(products.reshape(-1, 4).repeat(t, 1))
    if kept is not None:
        return torch.cat(rows)[kept], torch.cat(weights)[kept]
    return torch.cat(rows), torch.cat(weights)


def _axis_taps(size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two table places around each of `size` evenly spread positions, and their weights, both [size, 2]."""
    place = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    below = place.floor()
    taps = torch.stack((below, below + 1), dim=1)
    weights = (1 - (place[:, None] - taps).abs()).clamp_(min=0)
    return taps.long().clamp_(0, side - 1), weights


def window_order(
    grids: Iterable[Grid], merge: int, window: int, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Return the order that makes attention windows contiguous (Qwen2.5-VL).

    `window`: its side in merged patches. Returns int64 [P / merge**2], the merged patch for each place, and the
    windows' lengths in patches. Windows at the right and lower edge are smaller. `kept`: as of `kept_patches`; the
    patches that are not there are in no window, and a window without patches has no length.
    """
    order: list[torch.Tensor] = []
    lengths: list[int] = []
    first = 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        frame = torch.arange(rows * columns).view(rows, columns)
        tiles = [tile for band in frame.split(window) for tile in band.split(window, dim=1)]
        shuffled = torch.cat([tile.reshape(-1) for tile in tiles])
        order.extend(shuffled + (first + index * rows * columns) for index in range(t))
        lengths += [tile.numel() * merge**2 for tile in tiles] * t
        first += t * rows * columns
    places = torch.cat(order)
    if kept is None:
        return places, lengths
    there = kept[:: merge**2]
    numbers = there.cumsum(0) - 1
    chosen = there[places]
    counts = _counts(lengths, chosen.repeat_interleave(merge**2))
    return numbers[places[chosen]], counts


def frame_lengths(grids: Iterable[Grid], kept: torch.Tensor | None = None) -> list[int]:
    """Return the number of patches of every frame. `kept`: as of `kept_patches`."""
    lengths = [h * w for t, h, w in grids for _ in range(t)]
    return lengths if kept is None else _counts(lengths, kept)


def _counts(lengths: Sequence[int], kept: torch.Tensor) -> list[int]:
    """Count what is kept in consecutive parts of these lengths, without empty parts."""
    return [count for part in kept.split(list(lengths)) if (count := int(part.sum()))]


@dataclass(frozen=True)
class Segments:
    """Consecutive parts of a packed batch that attend to themselves. `lengths`: in patches."""

    lengths: Sequence[int]
    device: torch.device

    @cached_property
    def bounds(self) -> torch.Tensor:
        """int64 [segments + 1] on the CPU: where each segment begins, and where the last ends."""
        return torch.tensor((0, *self.lengths)).cumsum(0)

    def tiles(self, rows: int) -> torch.Tensor:
        """Return int32 [tiles, 3] on the device: a segment's begin and end, and the first of up to `rows` of its
        queries.

        Tiles of long segments come first: a GPU that ends with short ones ends evenly.
        """
        if rows not in self._tiles:
            lengths = self.bounds.diff()
            order = lengths.argsort(descending=True, stable=True)
            counts = (lengths[order] + rows - 1) // rows
            segment = order.repeat_interleave(counts)
            place = torch.arange(len(segment)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
            begins, ends = self.bounds[:-1][segment], self.bounds[1:][segment]
            tiles = torch.stack((begins, ends, begins + place * rows), dim=1).int()
            self._tiles[rows] = to_device(tiles, self.device)
        return self._tiles[rows]

    @cached_property
    def _tiles(self) -> dict[int, torch.Tensor]:
        return {}

    @cached_property
    def groups(self) -> list[tuple[int, slice | torch.Tensor]]:
        """The segments of each length together: the length, and their patches as a slice or int64 [count * length]."""
        starts: dict[int, list[int]] = {}
        for start, length in zip(self.bounds.tolist(), self.lengths, strict=False):
            starts.setdefault(length, []).append(start)
        groups: list[tuple[int, slice | torch.Tensor]] = []
        for length, begins in starts.items():
            if begins[-1] - begins[0] == length * (len(begins) - 1):
                groups.append((length, slice(begins[0], begins[-1] + length)))
            else:
                rows = (torch.tensor(begins)[:, None] + torch.arange(length)).view(-1)
                groups.append((length, to_device(rows, self.device)))
        return groups


class StaticSegments(ABC):
    """Segments in memory that a captured graph reads. Each replay can have others.

    Patches behind the last segment are padding, and their results are ignored.
    """

    @abstractmethod
    def fits(self, segments: Segments) -> bool:
        """Return True if there is room for these segments."""

    @abstractmethod
    def load(self, segments: Segments) -> None:
        """Write segments that fit into the memory."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        """Do the work of `segment_attention`, in launches that depend on no length."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of a tower's layers.

    `x`: [P, size], embedded patches, which may be overwritten. `rotary`: float32 [P, 1, head_dim] each. `segments`:
    whole frames, and windows if the tower has them. `order`: int64 [P / merge**2], the place of each embedding; None if
    they are in order.
    """

    x: torch.Tensor
    rotary: Rotation
    segments: tuple[Segments | StaticSegments, ...]
    order: torch.Tensor | None = None
