"""Loads a checkpoint into a module: every tensor of the one accounted for in the other, before any data is read.

A module's parameters have the published names, up to prefixes (`WeightRules.prefixes`). A module for which this does
not hold has some of these methods. Each is given the module's own name.

- stored_parameters: checkpoint names and the views to fill, which have the stored shape, of merged or reshaped weights.
- stored_cuts: checkpoint names, and which part of each tensor is here.
- stored_elsewhere: prefixes of the checkpoint names of tensors that other processes have.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vlmserve_common.checkpoint.reader import CheckpointReader, StoredTensor, parts_of
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.shard import Box, Cut, Cuts
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import CheckpointError

_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class WeightRules:
    """How published names become ours.

    prefixes: (published, ours); the first that fits is replaced, and both may be equal. ignored: regular expressions,
    searched in published names, of tensors that a checkpoint may have and no module needs.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def our_name(self, name: str) -> str:
        """Return the name of the parameter that a published name stands for."""
        for published, ours in self.prefixes:
            if name.startswith(published):
                return ours + name[len(published) :]
        return name

    def is_ignored(self, name: str) -> bool:
        """Whether a published name may be left unused."""
        return any(re.search(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True, kw_only=True)
class Update:
    """What is asked of tensors that replace those of a model. dtypes: of its own checkpoint's tensors, by our names;
    dtype: of all others. is_part: they need not be all."""

    dtypes: Mapping[str, torch.dtype]
    dtype: torch.dtype
    is_part: bool


def load_weights(module: nn.Module, reader: CheckpointReader, rules: WeightRules) -> None:
    """Fill all parameters of `module` from a checkpoint, cast to their dtype. Errors: those of `match_weights`."""
    reader.read_into(match_weights(module, reader, rules))


def match_weights(
    module: nn.Module,
    reader: CheckpointReader,
    rules: WeightRules,
    *,
    otherwise: Collection[str] = (),
    passed_over: Collection[str] = (),
    eight_bit: Collection[str] = (),
    update: Update | None = None,
) -> list[tuple[StoredTensor, torch.Tensor]]:
    """Match a checkpoint's tensors with the parameters of `module` that they fill. Reading casts to the module's dtype.

    otherwise: our names of parameters that are loaded in another way. passed_over: published names of tensors for these
    parameters. eight_bit: our names of parameters that may be stored as 8-bit floats; their scales are loaded in
    another way. update: what is asked of tensors that replace others. Raises CheckpointError that lists all missing,
    unexpected, doubled and misshaped tensors.
    """
    targets = {name: target for name, target in stored_tensors(module) if name not in otherwise}
    cuts, elsewhere = stored_cuts(module), stored_elsewhere(module)
    found: dict[str, StoredTensor] = {}
    unexpected, doubled, misshaped, whole, unscaled, others = [], [], [], [], [], []
    for name, stored in reader.tensors.items():
        if name in passed_over:
            continue
        ours = rules.our_name(name)
        if ours not in targets:
            if not rules.is_ignored(name) and not ours.startswith(elsewhere):
                unexpected.append(name)
        elif ours in found:
            doubled.append(f"{name} = {found[ours].name}")
        else:
            found[ours] = stored
            expected = tuple(targets[ours].shape)
            if ours in cuts:
                expected = cuts[ours].whole_shape(targets[ours].shape)
            if stored.shape != expected:
                misshaped.append(f"{name} is {list(stored.shape)}, not {list(expected)}")
            elif not stored.dtype.is_floating_point:
                whole.append(f"{name} is of {stored.dtype}")
            elif stored.dtype.itemsize == 1 and ours not in eight_bit:
                unscaled.append(name)
            elif update is not None and stored.dtype != (dtype := update.dtypes.get(ours, update.dtype)):
                others.append(f"{name} is {dtype_name(stored.dtype)}, not {dtype_name(dtype)}")
    missing = [_with_siblings(name, found.keys()) for name in targets if name not in found]
    if update is not None and update.is_part:
        missing = []
    problems = [
        f"{len(entries)} {what}: {'; '.join(entries[:_LISTED])}{'; ...' if len(entries) > _LISTED else ''}"
        for what, entries in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("given twice", doubled),
            ("of the wrong shape", misshaped),
            ("of whole numbers", whole),
            ("of 8-bit floats without a scale", unscaled),
            ("of another dtype", others),
        )
        if entries
    ]
    if problems:
        fit = "the configuration" if update is None else "the model that is served"
        raise CheckpointError(f"{reader.folder}: the tensors do not fit {fit}. " + ". ".join(problems))
    return [
        part
        for name, stored in found.items()
        for view, cut in pieces_of(targets[name], cuts.get(name))
        for part in parts_of(stored, cut, view)
    ]


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters of `module` as a checkpoint has them: names, and views of the stored shape."""
    for name, child in module.named_modules():
        yield from parameters_of(name, child)


def stored_elsewhere(module: nn.Module) -> tuple[str, ...]:
    """Return prefixes of the checkpoint names that other processes have."""
    return tuple(prefix for name, child in module.named_modules() for prefix in _ask(child, "stored_elsewhere", name))


def stored_cuts(module: nn.Module) -> dict[str, Cut | Cuts | Box]:
    """Return which part of a stored tensor is here, by the names of the tensors that are not here as a whole."""
    return {stored: cut for name, child in module.named_modules() for stored, cut in _ask(child, "stored_cuts", name)}


def parameters_of(name: str, child: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the module `name` itself; see `stored_tensors`."""
    if hasattr(child, "stored_parameters"):
        yield from _ask(child, "stored_parameters", name)
    else:
        for leaf, parameter in child.named_parameters(recurse=False):
            yield f"{name}.{leaf}" if name else leaf, parameter


def _ask(child: Any, method: str, name: str) -> Iterable[Any]:
    """Call one of the methods of the module docstring, if a module has it."""
    return getattr(child, method)(name) if hasattr(child, method) else ()


def pieces_of(view: torch.Tensor, cut: Cut | Cuts | Box | None) -> Iterator[tuple[torch.Tensor, Cut | Box | None]]:
    """Yield the pieces of a stored tensor that are here, one for each cut."""
    if cut is None or isinstance(cut, Box):
        yield view, cut
        return
    yield from zip(view.split([piece.size for piece in cut.pieces], cut.pieces[0].dim), cut.pieces, strict=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPiece:
    """Some outputs of a `Linear`: a view [n, K] of its weight, and its place in the stored tensor `name`.

    cut: the part of the stored tensor that the view is; None: all of it.
    """

    name: str
    view: torch.Tensor
    cut: Cut | None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole stored tensor, [outputs, inputs]."""
        shape = self.view.shape
        return tuple(shape) if self.cut is None else self.cut.whole_shape(shape)

    def place(self, dim: int) -> tuple[int, int]:
        """Return the piece's first index in one dimension of the stored tensor, and the index behind its last one."""
        start = 0 if self.cut is None or self.cut.dim != dim else self.cut.start
        return start, start + self.view.shape[dim]


def linears_of(module: nn.Module) -> Iterator[tuple[str, Linear, list[WeightPiece]]]:
    """Yield all `Linear`s with their names and the pieces of their weights, from the first output on."""
    for name, child in module.named_modules():
        if isinstance(child, Linear):
            cuts = dict(_ask(child, "stored_cuts", name))
            yield (
                name,
                child,
                [
                    WeightPiece(name=stored, view=view, cut=cut)
                    for stored, whole in parameters_of(name, child)
                    if stored.endswith(".weight") and whole.ndim == 2
                    for view, cut in pieces_of(whole, cuts.get(stored))
                    if not isinstance(cut, Box)  # which only experts have
                ],
            )


def _with_siblings(name: str, found: Iterable[str]) -> str:
    """Return a missing name, and the names present in the group that it is merged with (q/k/v, gate/up)."""
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        own = next((part for part in group if f".{part}." in name), None)
        if own is None:
            continue
        present = [part for part in group if name.replace(f".{own}.", f".{part}.") in set(found)]
        if present:
            return f"{name} (though {', '.join(present)} is there)"
    return name
