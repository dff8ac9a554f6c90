"""Sparse MLPs: a router chooses a few experts for each token, and only these compute it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from vlmserve_common.compute.activations import Activation
from vlmserve_common.compute.communicator import ALONE, Communicator
from vlmserve_common.compute.expert_exchange import Choice, Dispatched, Slots, make_exchange
from vlmserve_common.compute.expert_part import ExpertPart, part_of_experts
from vlmserve_common.compute.fp8 import FP8, ExpertScales
from vlmserve_common.compute.int_weights import ExpertInts
from vlmserve_common.compute.linear import Linear, Workspace, linear, pack_weight
from vlmserve_common.compute.shard import Box, Cut
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import fused
from vlmserve_common.kernels import packed_linear as native
from vlmserve_common.kernels.packed_linear import PackedWeight, can_pack, stacked
from vlmserve_common.kernels.quantized import Mode, QuantizedWeight, pack_quantized

if TYPE_CHECKING:
    from vlmserve_common.compute.lora import ActiveAdapters

ExpertLayout = Literal["inputs_first", "outputs_first", "each"]
"""The layout of experts' weights in a checkpoint. All of them are in one tensor, [experts, inputs, outputs] (as
published) or [experts, outputs, inputs] (as `transformers` 5 has them in memory). Or each has its own name."""

_EACH = re.compile(r"\d+\.(gate|up|down)_proj\.")
# What names of tensors of all experts end with.
_KNOWN = (".weight", "gate_up_proj", "down_proj", "_scale_inv", "_scale")
_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
)


class ExpertRouter(Linear):
    """Chooses `chosen` of `num_experts` for each token."""

    may_be_quantised = False

    def __init__(self, size: int, num_experts: int, chosen: int) -> None:
        super().__init__(size, num_experts, bias=False)
        self.chosen = chosen

    def choose(self, x: torch.Tensor) -> Choice:
        """Choose experts for x [N, size], and return them with their scores. A softmax in float32 over the router's
        outputs, rounded to x's dtype, finds the likeliest. Their probabilities are scaled to add up to 1, and rounded
        to x's dtype."""
        logits = self(x)
        if self.packed is not None:
            return native.route(logits, self.chosen)
        if logits.is_cuda:
            from vlmserve_common.kernels.gpu.routing import route  # not where there is no GPU

            return route(logits, self.chosen)
        odds, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self.chosen, dim=-1)
        return ids, (odds / odds.sum(dim=-1, keepdim=True)).to(x.dtype)


class Experts(nn.Module):
    """Experts, each of which computes down(act(gate(x)) * up(x)); uninitialised, inference only. part: which experts
    this process has, and how much of each.

    gate_up_proj, gates first, and down_proj lie as in the checkpoint (see `lay_out`), so they are read without a copy.
    `weights` always have the same layout. adapters: what active adapters add, under which name; see `compute.lora`.
    """

    adapters: tuple[ActiveAdapters, str] | None = None
    gate_up_proj: nn.Parameter | None
    down_proj: nn.Parameter | None

    def __init__(self, part: ExpertPart, size: int, act: Activation) -> None:
        super().__init__()
        count = len(part.own)
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * part.size, size), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(count, size, part.size), requires_grad=False)
        self.part, self.size = part, size
        self.act = act
        self.layout: ExpertLayout = "outputs_first"
        self.packed: tuple[PackedWeight, PackedWeight] | None = None
        self.fp8: ExpertScales | None = None
        self.ints: ExpertInts | None = None

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [experts, 2 * intermediate_size, size] and [experts, size, intermediate_size]; there until `pack`, and
        not with `ints`."""
        assert self.gate_up_proj is not None
        assert self.down_proj is not None
        if self.layout == "inputs_first":
            return self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return self.gate_up_proj, self.down_proj

    def lay_out(self, layout: ExpertLayout) -> None:
        """Lay the weights out as a checkpoint does, before they are filled."""
        gate_up, down = self.weights
        self.layout = layout
        if layout == "inputs_first":
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self.gate_up_proj = nn.Parameter(gate_up.new_empty(gate_up.shape), requires_grad=False)
        self.down_proj = nn.Parameter(down.new_empty(down.shape), requires_grad=False)

    def rows_of_slots(self) -> Iterator[torch.Tensor]:
        """Yield everything that belongs to experts, as writable views uint8 [slots, bytes]."""
        if self.packed is not None:
            whole = [weight.data for weight in self.packed]
            assert all(weight.count == len(self.part.own) for weight in self.packed)
        else:
            whole = [parameter.detach() for parameter in self.parameters()]
        for tensor in whole:
            yield tensor.view(len(self.part.own), -1).view(torch.uint8)

    def hold_fp8(self, scales: ExpertScales) -> None:
        """Replace the plain weights by uninitialised ones of 8-bit floats."""
        assert self.gate_up_proj is not None
        assert self.down_proj is not None
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.empty_like(weights, dtype=FP8), requires_grad=False)
            for weights in (self.gate_up_proj, self.down_proj)
        )
        self.fp8 = scales

    def hold_ints(self, ints: ExpertInts) -> None:
        """Have weights of whole numbers, uninitialised, in place of the plain ones, which go."""
        self.gate_up_proj = self.down_proj = None
        self.ints = ints

    def take(self, gate_up: Iterable[QuantizedWeight], down: Iterable[QuantizedWeight]) -> None:
        """Compute with quantised weights of each slot, which `can_pack_quantized`, in place of `ints`, which go."""
        assert self.ints is not None
        count, dtype, self.ints = len(self.part.own), self.ints.down.form.dtype, None
        packed_gate_up = stacked((pack_quantized(weight, None, dtype, gated=True) for weight in gate_up), count)
        self.packed = packed_gate_up, stacked((pack_quantized(weight, None, dtype) for weight in down), count)

    def pack(self, mode: Mode | None = None) -> None:
        """Lay the weights out for this process's operators, if these can use them; the plain ones go.

        mode: how weights are quantised, if they can be.
        """
        if self.gate_up_proj is None or not all(can_pack(weights[0]) for weights in self.weights):
            return
        # one after the other: of the first there is then no more than one
        gate_up, down = self.weights
        count = len(down)
        packed_gate_up = stacked((pack_weight(weight, None, mode, gated=True) for weight in gate_up), count)
        self.gate_up_proj = self.down_proj = None
        del gate_up
        self.packed = packed_gate_up, stacked((pack_weight(weight, None, mode) for weight in down), count)

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights`; by `layout`."""
        for leaf, weights in self.named_parameters(recurse=False):
            if self.layout == "each":
                parts = _PARTS[leaf]
                for expert, weight in zip(self.part.own, weights, strict=True):
                    for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                        yield f"{name}.{expert}.{part}.weight", piece
            else:
                yield f"{name}.{leaf}", weights

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cut | Box]]:
        """See `checkpoint.weights`."""
        part = self.part
        for leaf in () if part.is_whole else ("gate_up_proj", "down_proj"):
            if self.layout != "each":
                yield f"{name}.{leaf}", self._box(leaf)
            elif part.cuts_experts:
                cut = Cut(0 if leaf == "gate_up_proj" else 1, part.first, part.size, part.inner)
                yield from ((f"{name}.{expert}.{own}.weight", cut) for expert in part.own for own in _PARTS[leaf])

    def stored_elsewhere(self, name: str) -> Iterator[str]:
        """See `checkpoint.weights`."""
        if self.layout == "each":
            yield from (f"{name}.{expert}." for expert in self.part.elsewhere)

    def _box(self, leaf: str) -> Box:
        part = self.part
        parts = len(_PARTS[leaf])
        inner = tuple((half * part.inner + part.first, part.size) for half in range(parts))
        outputs, inputs = inner, ((0, self.size),)
        shape = (parts * part.inner, self.size)
        if (leaf == "down_proj") != (self.layout == "inputs_first"):
            outputs, inputs, shape = inputs, outputs, shape[::-1]
        return Box((part.stretches_of_experts(), outputs, inputs), (part.count, *shape))

    def stored_so(self, shapes: Mapping[str, tuple[int, ...]]) -> ExpertLayout:
        """Return the layout of a checkpoint whose experts have tensors of these names and shapes; the published one if
        these do not tell. CheckpointError for quantised ones."""
        for name in shapes:
            if _EACH.match(name):
                return "each"
            if not name.endswith(_KNOWN):
                raise CheckpointError(
                    f"{name}: whole numbers of all experts in one tensor are not supported; take a checkpoint with a "
                    "name for each expert, the plain one, or that of 8-bit floats"
                )
        whole = self.part.count, self.part.inner
        for leaf, outputs, inputs in (("gate_up_proj", 2 * whole[1], self.size), ("down_proj", self.size, whole[1])):
            if outputs != inputs and shapes.get(leaf) == (whole[0], outputs, inputs):
                return "outputs_first"
        return "inputs_first"

    def forward(
        self,
        x: torch.Tensor,
        choice: Choice,
        residual: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """Add the sum of each token's experts, times their scores, to `residual`: x [N, size] -> [N, size].

        workspace: see `compute.linear.linear`. The choice has slots of this process's part, and numbers below 0 for
        experts elsewhere.
        """
        ids, scores = choice
        if self.adapters is not None and any(one.has_experts for one in self.adapters[0].adapters):
            out = self._one_by_one(x, ids, scores, workspace)
            return out if residual is None else out.add_(residual)
        if self.packed is not None:
            return native.run_experts(x, ids, scores, *self.packed, act=self.act.name, residual=residual)
        if self.act.name == "silu" and (x.is_cuda or (self.ints is not None and fused.usable(x))):
            from vlmserve_common.kernels.gpu.experts import run_experts  # not where there is no GPU

            gate_up, down = self.weights if self.ints is None else (self.ints.gate_up, self.ints.down)
            return run_experts(x, ids.int(), scores, gate_up, down, residual, self.fp8)
        out = self._one_by_one(x, ids, scores, workspace)
        return out if residual is None else out.add_(residual)

    def _one_by_one(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, workspace: Workspace | None
    ) -> torch.Tensor:
        """Compute the experts that are hit, each with all its tokens. A token's sum is in the order of its scores,
        whatever else is in the batch."""
        chosen = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        rows = x[order // chosen]
        made = torch.zeros_like(rows)
        slots = ids.flatten()
        first = int((slots < 0).sum())  # of which nothing is made here
        for expert, count in enumerate(slots[slots >= 0].bincount(minlength=len(self.part.own)).tolist()):
            if count:
                own = slice(first, first + count)
                tokens = order[own] // chosen
                inside = self._product("gate_up_proj", expert, rows[own], tokens, workspace)
                made[order[own]] = self._product("down_proj", expert, inside, tokens, workspace)
                first += count
        made = made.view(len(x), chosen, x.shape[1])
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for place in range(chosen):
            total.addcmul_(made[:, place].float(), scores[:, place, None].float())
        return total.to(x.dtype)

    def _product(
        self, leaf: str, slot: int, x: torch.Tensor, tokens: torch.Tensor, workspace: Workspace | None
    ) -> torch.Tensor:
        """Multiply by one expert's weight; by gate_up_proj: act(gates) * rest. tokens: int64, whose rows x are."""
        gated, added = leaf == "gate_up_proj", None
        if self.adapters is not None and self.adapters[0].adapters:
            active, name = self.adapters
            added = active.added((f"{name}.{leaf}", slot), x, active.rows[tokens.cpu().numpy()])
        if self.packed is not None:
            weight = self.packed[0 if gated else 1].one(slot)
            return native.linear(x, weight, act=self.act.name if gated else "", added=added)
        if self.ints is not None:
            out = (self.ints.gate_up if gated else self.ints.down).product(x, index=slot)
        else:
            out = linear(x, self._weight_of(0 if gated else 1, slot, x.dtype), workspace=workspace)
        if added is not None:
            out += added
        return self.act.gate(out) if gated else out

    def _weight_of(self, index: int, slot: int, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weights[index][slot]
        if self.fp8 is None:
            return weight
        scales = tuple(self.fp8.spread(slot))[index]
        return (weight.float() * scales[: weight.shape[0], : weight.shape[1]]).to(dtype)


class SparseMLP(nn.Module):
    """A router and its experts, under the names of published checkpoints. comm: between the processes that share the
    experts; each of them has the whole router."""

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        num_experts: int,
        chosen: int,
        act: Activation,
        comm: Communicator = ALONE,
    ) -> None:
        super().__init__()
        self.gate = ExpertRouter(size, num_experts, chosen)
        self.experts = Experts(part_of_experts(num_experts, intermediate_size, comm.shard), size, act)
        self.slots = None if comm.shard.is_whole else Slots(num_experts, comm.shard)
        self._exchange = None if self.slots is None else make_exchange(self.slots, comm, chosen)

    @property
    def first_expert(self) -> int | None:
        """The first expert here, if the experts here are a fixed stretch of all, and every process has all tokens;
        otherwise None."""
        if self.slots is None:
            return 0
        return None if isinstance(self._exchange, Dispatched) or not self.slots.is_plain else self.slots.first

    def beside(self, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor | None:
        """Return this process's part of a sum [N, size] of all tokens, which the caller adds; None if there is none. x:
        the MLP's input; routed: the tokens that are routed here."""
        return None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, size] -> [N, size], added to `residual`."""
        routed = x if self._exchange is None else self._exchange.tokens(x)
        beside, x = self.beside(x, routed), routed
        choice = self.gate.choose(x)
        if self._exchange is None:
            out = self.experts(x, choice, residual if beside is None else beside, self.gate.workspace)
            return out if residual is None or beside is None else out.add_(residual)
        out = self._exchange(x, choice, partial(self.experts, workspace=self.gate.workspace), beside)
        return out if residual is None else out.add_(residual)


def pack_experts(module: nn.Module, mode: Mode | None = None) -> None:
    """Let all `Experts` in `module` use this process's operators; see `Experts.pack`."""
    for child in module.modules():
        if isinstance(child, Experts):
            child.pack(mode)


def choose_layouts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give all `Experts` in `module` a checkpoint's layout, before they are filled. shapes: of its tensors, by our
    names. CheckpointError for experts of whole numbers in one tensor."""
    for name, child in module.named_modules():
        if isinstance(child, Experts):
            prefix = f"{name}."
            own = {stored.removeprefix(prefix): shapes[stored] for stored in shapes if stored.startswith(prefix)}
            try:
                child.lay_out(child.stored_so(own))
            except CheckpointError as error:
                raise CheckpointError(f"{prefix}{error}") from None
