"""LoRA (Hu et al. 2021): adapters that change linear layers by s B A, beside the weights, each for its own rows.

`AdapterLayout` says where the layers of a checkpoint are in this process's modules. `AdapterLayout.place` checks an
adapter's file against it and makes the `Adapter`: this process's part of the factors. `ActiveAdapters` says whose rows
a product has, and computes what the adapters add to it. A product of several adapters takes one call for each of them,
or one for all where this process has the operators.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from torch import nn

from vlmserve_common.checkpoint.adapter_file import AdapterFile, LoraConfig, LoraPair, listed
from vlmserve_common.checkpoint.weights import WeightRules, linears_of
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.linear import Linear, linear
from vlmserve_common.compute.shard import Cut
from vlmserve_common.errors import CheckpointError, EngineError
from vlmserve_common.kernels import fused
from vlmserve_common.kernels import lora as native
from vlmserve_common.kernels.lora import PackedFactors

if TYPE_CHECKING:
    from vlmserve_common.compute.lora_tables import AdapterTables
    from vlmserve_common.kernels.gpu.lora import DeviceFactors, FactorsTable

Key: TypeAlias = tuple[str, int]
"""The product that factors belong to: the name of a `Linear`, or of an `Experts`' weight with the slot of an expert."""
_EACH_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")
_EXPERTS_WEIGHTS = ("gate_up_proj", "down_proj")
_OF_EXPERTS = tuple(f".experts.{leaf}" for leaf in _EXPERTS_WEIGHTS)
_NEVER = re.compile(r"lm_head|mtp\.|.*\bembed_tokens")


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What an adapter adds to one product here: x A^T B^T, all scaled already.

    a: [parts * rank, inputs], b: [outputs, rank]. The outputs are `parts` of the sizes given, side by side; each part
    has its own `rank` rows of a.
    """

    a: torch.Tensor
    b: torch.Tensor
    sizes: tuple[int, ...]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, inputs] -> [M, outputs]."""
        inner = linear(x, self.a).split(self.b.shape[1], dim=1)
        return torch.cat([linear(h, b) for h, b in zip(inner, self.b.split(self.sizes), strict=True)], dim=1)


AnyFactors: TypeAlias = "Factors | PackedFactors | DeviceFactors"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """This process's part of an adapter. factors: by the product that they belong to; packed where the product is.
    has_experts: whether it changes experts, of any process."""

    digest: str
    factors: Mapping[Key, AnyFactors]
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Rows of a linear's output that are a stored tensor, or a cut of it."""

    stored: str
    rows: int
    cut: Cut | None


@dataclass(frozen=True, kw_only=True)
class AdapterLayout:
    """Where adapters go. Made of a model's outline, as weights may be packed or quantised later.

    pieces: of each linear, from its first output on. experts: by name. shapes: [outputs, inputs] of each stored tensor
    of the whole model. rules: how published names become ours.
    """

    rules: WeightRules
    pieces: Mapping[str, Sequence[_Piece]]
    experts: Mapping[str, Experts]
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)

    @classmethod
    def of(cls, outline: nn.Module, rules: WeightRules) -> AdapterLayout:
        """Make the layout of a module, which may be on the meta device."""
        pieces, shapes = dict[str, Sequence[_Piece]](), dict[str, tuple[int, ...]]()
        for name, _, stored in linears_of(outline):
            if stored and not _NEVER.match(name):
                pieces[name] = [
                    _Piece(stored=one.name.removesuffix(".weight"), rows=len(one.view), cut=one.cut) for one in stored
                ]
                shapes |= {one.name.removesuffix(".weight"): one.whole_shape for one in stored}
        experts = {
            name: child
            for name, child in outline.named_modules()
            if isinstance(child, Experts) and not _NEVER.match(name)
        }
        return cls(rules=rules, pieces=pieces, experts=experts, shapes=shapes)

    def check(self, file: AdapterFile, *, partly: bool = False) -> tuple[str, ...]:
        """Check that this whole model has all that a file changes. Return what is passed over: with `partly`, modules
        that are not here. CheckpointError says what fits and what does not."""
        unknown, misshaped, fitting = [], [], 0
        places: dict[str, str] = {}
        for module, pair in file.pairs.items():
            try:
                stored, shape, count = self._target(module, pair)
            except KeyError:
                unknown.append(module)
                continue
            own_expert = _EACH_EXPERT.fullmatch(self.our_name(module))
            other = places.setdefault(own_expert[0] if own_expert else stored, module)
            if other != module:
                raise CheckpointError(f"{file.folder}: {module} and {other} change the same weight")
            rank, left = divmod(len(pair.a), count)
            given = (len(pair.b), pair.a.shape[1])
            if given != shape or left or pair.b.shape[1] != len(pair.a):
                b = f"lora_B {list(pair.b.shape)}"
                misshaped.append(
                    f"{module} has lora_A {list(pair.a.shape)} and {b} for a weight of shape {list(shape)}"
                )
            else:
                file.config.scale(self._pattern_name(module, pair), rank)
                fitting += 1
        if misshaped:
            raise CheckpointError(
                f"{file.folder}: the adapter is for a model of other sizes: {'; '.join(misshaped[:3])}"
                f"{f' and {len(misshaped) - 3} more' if len(misshaped) > 3 else ''}"
            )
        if unknown and not (partly and fitting):
            raise CheckpointError(
                f"{file.folder}: {len(unknown)} of {len(file.pairs)} modules match nothing in this model: "
                f"{listed(unknown)}; {fitting} match"
                + (" (setting --lora-partial takes these and leaves the others out)" if fitting else "")
            )
        return tuple(unknown)

    def place(self, file: AdapterFile, module: nn.Module, *, dtype: torch.dtype, plain: bool = False) -> Adapter:
        """Return the part of a checked file that belongs to this process's `module`, on its devices. Its weights may be
        packed by now. plain: not laid out for any operator."""
        by_stored: dict[str, list[tuple[str, LoraPair]]] = {}
        for name, pair in file.pairs.items():
            try:
                stored = self._target(name, pair)[0]
            except KeyError:
                continue
            by_stored.setdefault(stored, []).append((name, pair))
        factors: dict[Key, AnyFactors] = {}
        for name, pieces in self.pieces.items():
            if any(piece.stored in by_stored for piece in pieces):
                own = _of_linear(pieces, {one: by_stored[one][0] for one in by_stored}, file.config)
                factors[name, 0] = _ready(own, module.get_submodule(name), dtype, plain=plain)
        for name, outline in self.experts.items():
            for leaf in _EXPERTS_WEIGHTS:
                found = by_stored.get(f"{name}.{leaf}")
                if found:
                    own_experts = module.get_submodule(name)
                    assert isinstance(own_experts, Experts)
                    for slot, made in _of_experts(outline, leaf, found, file.config):
                        factors[f"{name}.{leaf}", slot] = _ready(
                            made, own_experts, dtype, plain=plain, gated=leaf != "down_proj"
                        )
        has_experts = any(stored.endswith(_OF_EXPERTS) for stored in by_stored)
        return Adapter(digest=file.digest, factors=factors, has_experts=has_experts)

    def products(self, prefix: str) -> dict[str, list[int]]:
        """Return the sizes of the parts of each linear whose name begins so, as `Factors` has them."""
        named = {name: pieces for name, pieces in self.pieces.items() if name.startswith(prefix)}
        return {name: list(_parts_of(pieces).values()) for name, pieces in named.items()}

    def _target(self, module: str, pair: LoraPair) -> tuple[str, tuple[int, ...], int]:
        """Return what a module of a file changes: our name of the stored tensor, its shape [outputs, inputs], and how
        many of them lie side by side. KeyError for what is not here."""
        ours = self.our_name(module)
        if each := _EACH_EXPERT.fullmatch(ours):
            part = self.experts[each[1]].part
            if int(each[2]) >= part.count:
                raise KeyError(module)
            leaf, hidden = each[3], self.experts[each[1]].size
            shape = (hidden, part.inner) if leaf == "down" else (part.inner, hidden)
            return f"{each[1]}.{'down_proj' if leaf == 'down' else 'gate_up_proj'}", shape, 1
        fused = ours.removesuffix(".base_layer")
        if fused in self.experts:
            experts = self.experts[fused]
            both = {
                "gate_up_proj": (2 * experts.part.inner, experts.size),
                "down_proj": (experts.size, experts.part.inner),
            }
            # PEFT nests two parameters of one module, so names do not say which is which
            fits = [leaf for leaf, shape in both.items() if shape == (len(pair.b), pair.a.shape[1])]
            leaf = fits[0] if len(fits) == 1 else ("gate_up_proj" if ours.endswith(".base_layer") else "down_proj")
            return f"{fused}.{leaf}", both[leaf], experts.part.count
        return ours, self.shapes[ours], 1

    def _pattern_name(self, module: str, pair: LoraPair) -> str:
        """Return the name that a config's patterns are for."""
        target = self._target(module, pair)[0]
        leaf = target.rpartition(".")[2]
        if leaf in _EXPERTS_WEIGHTS and not _EACH_EXPERT.fullmatch(self.our_name(module)):
            return f"{module.removesuffix('.base_layer')}.{leaf}"
        return module

    def our_name(self, module: str) -> str:
        """Return our name of a module, given that of any usual way to name it."""
        if module.startswith("layers."):  # of a decoder without a head
            return f"language_model.{module}"
        return self.rules.our_name(module)


def _parts_of(pieces: Sequence[_Piece]) -> dict[str, int]:
    """Return the rows of each stored tensor that a linear merges, in their order."""
    sizes = dict[str, int]()
    for piece in pieces:
        sizes[piece.stored] = sizes.get(piece.stored, 0) + piece.rows
    return sizes


def _of_linear(pieces: Sequence[_Piece], found: Mapping[str, tuple[str, LoraPair]], config: LoraConfig) -> Factors:
    """Make a linear's factors of those of the tensors that it merges. Parts without factors have zeros."""
    order = _parts_of(pieces)
    rank = max(len(found[one][1].a) for one in order if one in found)
    cut = pieces[0].cut
    some = next(found[one][1] for one in order if one in found)
    columns = slice(None) if cut is None or cut.dim == 0 else slice(cut.start, cut.start + cut.size)
    inputs = some.a[:, columns].shape[1]
    a, b = torch.zeros(len(order), rank, inputs), list[torch.Tensor]()
    for index, (stored, size) in enumerate(order.items()):
        own = [piece for piece in pieces if piece.stored == stored]
        part = torch.zeros(size, rank)
        if stored in found:
            name, pair = found[stored]
            a[index, : len(pair.a)] = pair.a[:, columns]
            scale, done = config.scale(name, len(pair.a)), 0
            for piece in own:
                start = 0 if piece.cut is None or piece.cut.dim else piece.cut.start
                part[done : done + piece.rows, : len(pair.a)] = scale * pair.b[start : start + piece.rows].float()
                done += piece.rows
        b.append(part)
    return Factors(a=a.flatten(0, 1), b=torch.cat(b), sizes=tuple(order.values()))


def _of_experts(
    outline: Experts, leaf: str, found: Sequence[tuple[str, LoraPair]], config: LoraConfig
) -> Iterator[tuple[int, Factors]]:
    """Yield each slot's factors for one of the two products, as far as it has any."""
    part = outline.part
    inner = slice(part.first, part.first + part.size)
    single = {(int(each[2]), each[3]): (name, pair) for name, pair in found if (each := _EACH_EXPERT.fullmatch(name))}
    for slot, expert in enumerate(part.own):
        pairs: list[tuple[torch.Tensor, torch.Tensor, float] | None]
        if single:
            names = ("down",) if leaf == "down_proj" else ("gate", "up")
            pairs = []
            for one in names:
                own = single.get((expert, one))
                pairs.append(None if own is None else (own[1].a, own[1].b, config.scale(own[0], len(own[1].a))))
            if not any(pairs):
                continue
        else:
            name, pair = found[0]
            rank = len(pair.a) // part.count
            a = pair.a.view(part.count, rank, -1)[expert]  # expert-major
            b = pair.b.view(len(pair.b), rank, part.count)[:, :, expert]  # rank-major
            pairs = [(a, b, config.scale(f"{name.removesuffix('.base_layer')}.{leaf}", rank))]
        yield slot, _join(pairs, leaf, inner, part.inner, outline.size)


def _join(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None], leaf: str, inner: slice, whole: int, size: int
) -> Factors:
    rank = max(len(pair[0]) for pair in pairs if pair is not None)
    down, own = leaf == "down_proj", inner.stop - inner.start
    halves = 1 if down or len(pairs) == 2 else 2  # gate and up of one factor
    outputs = size if down else halves * own
    a = torch.zeros(len(pairs), rank, own if down else size)
    b = torch.zeros(len(pairs), outputs, rank)
    for index, pair in enumerate(pairs):
        if pair is not None:
            a[index, : len(pair[0])] = pair[0][:, inner] if down else pair[0]
            rows = pair[1] if down else pair[1].unflatten(0, (halves, whole))[:, inner].flatten(0, 1)
            b[index, :, : len(pair[0])] = pair[2] * rows.float()
    return Factors(a=a.flatten(0, 1), b=b.flatten(0, 1), sizes=(outputs,) * len(pairs))


def _ready(factors: Factors, module: nn.Module, dtype: torch.dtype, *, plain: bool, gated: bool = False) -> AnyFactors:
    """Return factors as a product needs them: packed as its weight is, or on its device."""
    packed = module.packed if isinstance(module, Linear | Experts) else None
    if packed is not None and not plain:
        gated = module.gated if isinstance(module, Linear) else gated
        return native.pack_factors(factors.a.to(dtype), factors.b.to(dtype), factors.sizes, gated=gated)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    made = Factors(a=factors.a.to(device, dtype), b=factors.b.to(device, dtype), sizes=factors.sizes)
    return made if plain or not fused.usable(made.a) else _on_gpu(made)


def _on_gpu(factors: Factors) -> DeviceFactors:
    from vlmserve_common.kernels.gpu.lora import DeviceFactors  # not where there is no GPU

    sizes = torch.tensor(factors.sizes, device=factors.a.device)
    parts = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device, dtype=torch.int32), sizes)
    return DeviceFactors(a=factors.a.contiguous(), b=factors.b.t().contiguous(), parts=parts)


def merge(adapter: Adapter, module: nn.Module) -> None:
    """Add an adapter to the weights of a module, which are not packed yet. EngineError for quantised ones."""
    for (name, slot), one in adapter.factors.items():
        parent, _, leaf = name.rpartition(".")
        experts = module.get_submodule(parent) if leaf in _EXPERTS_WEIGHTS else None
        if isinstance(experts, Experts):
            plain = experts.fp8 is None and experts.gate_up_proj is not None
            weight = experts.weights[_EXPERTS_WEIGHTS.index(leaf)][slot] if plain else None
        else:
            own = module.get_submodule(name)
            weight = own.weight if isinstance(own, Linear) and own.fp8 is None else None
        if weight is None or not isinstance(one, Factors):
            raise EngineError(f"{name} is quantised, and no adapter can be merged into it: serve it beside the weights")
        parts = zip(one.a.split(one.b.shape[1]), one.b.split(one.sizes), weight.split(one.sizes), strict=True)
        for a, b, rows in parts:
            rows.copy_((rows.float() + b @ a).to(rows.dtype))


_ANY = Adapter(digest="", factors={})
"""Stands for the adapters that tables hold."""


class ActiveAdapters:
    """The adapters of what is being computed in this thread. `use` says whose the rows of products are."""

    def __init__(self) -> None:
        self._rows = np.zeros(0, dtype=np.int32)
        self.adapters: tuple[Adapter, ...] = ()
        self._tables: dict[Key, tuple[tuple[Adapter, ...], FactorsTable]] = {}
        self._sent: tuple[np.ndarray, torch.Tensor] | None = None
        self._fixed: AdapterTables | None = None

    @contextmanager
    def by(self, tables: AdapterTables) -> Iterator[None]:
        """Let products add what is in some tables in place of the active adapters: for a step that is captured."""
        with self.use([(_ANY, 1)]):
            self._fixed = tables
            try:
                yield
            finally:
                self._fixed = None

    @contextmanager
    def use(self, spans: Sequence[tuple[Adapter | None, int]]) -> Iterator[None]:
        """Say that the rows of products belong to these adapters, so many each, one behind the other. None: to
        none."""
        before = self.adapters, self._rows
        self.adapters = tuple({one.digest: one for one, _ in spans if one is not None}.values())
        place = {one.digest: index for index, one in enumerate(self.adapters)}
        self._rows = np.repeat(
            np.array([-1 if one is None else place[one.digest] for one, _ in spans], dtype=np.int32),
            [count for _, count in spans],
        )
        try:
            yield
        finally:
            self.adapters, self._rows = before

    @property
    def rows(self) -> np.ndarray:
        """int32 [N]: the number of each row's adapter among `adapters`; -1 for none."""
        return self._rows

    def added(self, key: Key, x: torch.Tensor, rows: np.ndarray | None = None) -> torch.Tensor | None:
        """Return what adapters add to a product of x [M, inputs]; None for nothing. The result is [M, outputs], or
        float32 in the order of packed outputs where the product is packed. rows: see `rows`, of x; those by default.
        """
        if self._fixed is not None:
            return self._fixed.added(key[0], x)
        factors = [one.factors.get(key) for one in self.adapters]
        if not any(one is not None for one in factors):
            return None
        rows = self._rows if rows is None else rows
        if len(rows) == 1 and len(x) > 1:  # all rows are of one adapter
            rows = np.broadcast_to(rows, len(x))
        assert len(rows) == len(x), (key, len(rows), len(x))
        some = next(one for one in factors if one is not None)
        if isinstance(some, PackedFactors):
            return native.added(x, [one if isinstance(one, PackedFactors) else None for one in factors], rows)
        if not isinstance(some, Factors):
            return self._by_kernels(key, x.contiguous(), rows)
        total: torch.Tensor | None = None
        for number, one in enumerate(factors):
            own = np.flatnonzero(rows == number)
            if isinstance(one, Factors) and len(own):
                if len(own) == len(x):
                    return one.of(x)
                if total is None:
                    total = x.new_zeros(len(x), len(one.b))
                index = torch.from_numpy(own).to(x.device)
                total[index] = one.of(x[index])
        return total

    def _by_kernels(self, key: Key, x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """`added` by the GPU's kernels. A product's table of factors stays while the same adapters are active for it,
        and rows while they are the same."""
        from vlmserve_common.kernels.gpu import lora as kernels  # not where there is no GPU

        adapters, table = self._tables.get(key, ((), None))
        if table is None or not are_same(adapters, self.adapters):
            factors = [cast("DeviceFactors | None", one.factors.get(key)) for one in self.adapters]
            table = kernels.FactorsTable.of(factors, x.device)
            self._tables[key] = self.adapters, table
        if self._sent is None or self._sent[0] is not rows:
            self._sent = rows, torch.from_numpy(np.ascontiguousarray(rows)).to(x.device)
        return kernels.added(x, table, self._sent[1])


def are_same(some: Sequence[Adapter], others: Sequence[Adapter]) -> bool:
    """Whether these are the same objects: an adapter that is loaded again lies elsewhere."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


class AdaptedLayers:
    """What active adapters add to the products of packed layers that are computed in one call; see
    `kernels.decoder.LayerAdapters`. names: of each layer's products, "" for those that adapters do not change there."""

    def __init__(self, active: ActiveAdapters, names: Sequence[Sequence[str]]) -> None:
        self._active, self._names = active, names
        self._known = {name for layer in names for name in layer}
        self._of: tuple[Adapter, ...] = ()
        self._structs = native.structs(())
        self._covers_all = True
        self._rows = np.zeros(0, dtype=np.int32)

    @property
    def covers_all(self) -> bool:
        """Whether active adapters change nothing else in the decoder."""
        self._follow()
        return self._covers_all or not self._active.adapters

    def of_step(self) -> tuple[int | None, int | None, int]:
        """See `kernels.decoder.LayerAdapters`."""
        if not self._active.adapters:
            return None, None, 0
        self._follow()
        self._rows = np.ascontiguousarray(self._active.rows, dtype=np.int32)
        return self._rows.ctypes.data, ctypes.addressof(self._structs), len(self._of)

    def _follow(self) -> None:
        """Make what depends on the active adapters alone, if these are others than before."""
        adapters = self._active.adapters
        if not adapters or are_same(adapters, self._of):
            return
        found = [one.factors.get((name, 0)) for layer in self._names for name in layer for one in adapters]
        self._structs = native.structs([one if isinstance(one, PackedFactors) else None for one in found])
        changed = {name for one in adapters for name, _ in one.factors}
        self._covers_all = all(name in self._known or name.startswith("visual.") for name in changed)
        self._of = adapters


def attach(module: nn.Module, layout: AdapterLayout, active: ActiveAdapters) -> None:
    """Let the products of `module` add what active adapters say."""
    for name in layout.pieces:
        own = module.get_submodule(name)
        assert isinstance(own, Linear)
        own.adapters = active, name
    for name in layout.experts:
        experts = module.get_submodule(name)
        assert isinstance(experts, Experts)
        experts.adapters = active, name
