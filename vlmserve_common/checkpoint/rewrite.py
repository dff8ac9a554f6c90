"""Writes tensors into a module that computes already, in place: every address stays, as captured graphs and operators
need it.

Weights may be packed, so that no parameter has the form of a checkpoint any more. Therefore tensors are matched with an
*outline*: the same module on the meta device, as it was before it was filled. A view of an outline's parameter says
which part of the module's own weight a tensor is. Tensors stream through a few small buffers, and rows are packed one
buffer at a time, so there is never a second copy of a weight. Experts that are stored the other way around than they
are needed are the exception: such a tensor is held whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from vlmserve_common.checkpoint.reader import read_parts
from vlmserve_common.checkpoint.stream import Copies, Part, Progress, StoredTensor, copies_to
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.linear import Linear, rewrite_rows
from vlmserve_common.kernels.packed_linear import PackedWeight, rewrite_bias


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A parameter of an outline, and whose it is in the module: `child`, under the name `leaf`."""

    outline: nn.Module
    child: nn.Module
    leaf: str
    parameter: torch.Tensor

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weight that stands for it."""
        packed = self.child.packed if isinstance(self.child, Linear | Experts) else None
        return packed[self.leaf == "down_proj"] if isinstance(packed, tuple) else packed

    @property
    def row(self) -> int:
        """Elements of an output's weights, as they are stored."""
        shape = self.parameter.shape
        return shape[-1] if isinstance(self.child, Experts) else math.prod(shape[1:])  # 1 for a bias

    @property
    def turned(self) -> bool:
        """Whether outputs and inputs have changed places."""
        if not (isinstance(self.child, Experts) and isinstance(self.outline, Experts)):
            return False
        mine = self.child.layout == "inputs_first" and self.packed is None
        return (self.outline.layout == "inputs_first") != mine


class Rewriter:
    """Writes into `module`, by its `outline`."""

    def __init__(self, module: nn.Module, outline: nn.Module) -> None:
        self._places = {
            _memory(parameter): _Place(
                outline=child, child=module.get_submodule(name), leaf=leaf, parameter=parameter.detach()
            )
            for name, child in outline.named_modules()
            for leaf, parameter in child.named_parameters(recurse=False)
        }

    @torch.inference_mode()
    def write(
        self, matched: Iterable[tuple[StoredTensor, torch.Tensor]], alive: Callable[[], object] = lambda: None
    ) -> None:
        """Write stored tensors in the places of the outline's views that they were matched with. alive: called after
        each piece. CheckpointError for a file that cannot be read, when some tensors are written already."""
        direct: dict[torch.device, list[Part]] = {}
        rows: list[Part] = []
        whole: dict[int, list[tuple[StoredTensor, torch.Tensor]]] = {}
        largest = 0
        for stored, view in matched:
            place = self._places[_memory(view)]
            own = getattr(place.child, place.leaf, None)
            if place.turned or not (own is not None or place.leaf == "bias" or _has_whole_rows(place, view)):
                whole.setdefault(_memory(view), []).append((stored, view))
            elif own is not None:
                there = own.detach().as_strided(view.shape, view.stride(), own.storage_offset() + view.storage_offset())
                direct.setdefault(own.device, []).append(_part(stored, there))
            else:
                rows.append(Part(stored=stored, start=stored.start, target=view.detach().reshape(-1, place.row)))
                largest = max(largest, (stored.row or place.row) * stored.dtype.itemsize)
        parts = [part for some in direct.values() for part in some] + rows
        parts += [_part(stored, view) for some in whole.values() for stored, view in some]
        progress = Progress(sum(part.size for part in parts))

        def done(count: int) -> None:
            progress.add(count)
            alive()

        for device, some in direct.items():
            read_parts(some, copies_to(device), done)
        read_parts(rows, _Packing(self._places), done, largest=largest)
        for memory, pieces in whole.items():  # one after the other: of these one is held
            self._write_whole(self._places[memory], pieces, done)
        progress.end()

    def _write_whole(
        self, place: _Place, pieces: list[tuple[StoredTensor, torch.Tensor]], done: Callable[[int], object]
    ) -> None:
        assert isinstance(place.child, Experts)
        assert isinstance(place.outline, Experts)
        held = torch.empty(place.parameter.shape, dtype=place.parameter.dtype)
        parts = [
            _part(stored, held.as_strided(view.shape, view.stride(), view.storage_offset())) for stored, view in pieces
        ]
        read_parts(parts, Copies(), done)
        experts = held.transpose(1, 2) if place.outline.layout == "inputs_first" else held
        if place.packed is None:
            place.child.weights[place.leaf == "down_proj"].copy_(experts)
            return
        for index, weight in enumerate(experts):
            rewrite_rows(place.packed, 0, weight.contiguous(), index=index)


class _Packing(Copies):
    """Packs rows as they come."""

    def __init__(self, places: dict[int, _Place]) -> None:
        self._places = places

    def start(self, source: torch.Tensor, target: torch.Tensor) -> None:
        place = self._places[_memory(target)]
        packed, offset = place.packed, int(target.storage_offset())
        assert packed is not None
        if place.leaf == "bias":
            rewrite_bias(packed, offset, source.flatten())
            return
        rows = source.reshape(-1, place.row)
        if isinstance(place.child, Linear):
            rows = place.child.in_order(rows)
        each = packed.outputs * (1 + packed.gated)
        index, first = divmod(offset // place.row, each)
        while len(rows):  # of several experts, perhaps
            rewrite_rows(packed, first, rows[: each - first], index=index)
            index, first, rows = index + 1, 0, rows[each - first :]


def _part(stored: StoredTensor, target: torch.Tensor) -> Part:
    flat = target.flatten(0, -2) if stored.row else target.view(-1)
    return Part(stored=stored, start=stored.start, target=flat)


def _has_whole_rows(place: _Place, view: torch.Tensor) -> bool:
    assert place.packed is not None, place.leaf
    return not isinstance(place.child, Experts) or view.shape[-1] == place.packed.inner


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
