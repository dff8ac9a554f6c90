"""Sparse MLPs: a router chooses a few experts for each token, which goes through these alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from vlmserve_common.compute.activations import Activation
from vlmserve_common.compute.linear import Linear, Workspace, linear, pack_weight
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import experts as native
from vlmserve_common.kernels.linear import PackedWeight, can_pack, stacked
from vlmserve_common.kernels.quantized import Mode

ExpertLayout = Literal["inputs_first", "outputs_first", "each"]
"""How a checkpoint has the weights of experts: all of them in one tensor, [experts, inputs, outputs] (as published) or
[experts, outputs, inputs] (as `transformers` 5 has them in memory), or each under its own name."""

Choice = tuple[torch.Tensor, torch.Tensor]
"""Experts [N, chosen] of each token, int64 (int32 on a GPU), and their scores [N, chosen] in its dtype."""


class Router(Linear):
    """Chooses `chosen` of `num_experts` for each token. Its weights are never quantised."""

    def __init__(self, size: int, num_experts: int, chosen: int) -> None:
        super().__init__(size, num_experts, bias=False)
        self.chosen = chosen

    def pack(self, mode: Mode | None = None) -> None:
        """See `Linear.pack`."""
        super().pack(None)

    def choose(self, x: torch.Tensor) -> Choice:
        """x [N, size] -> the experts that a softmax in float32 over the router's outputs, rounded to x's dtype, holds
        most likely, and their probabilities, which are made to add up to 1 and rounded to x's dtype."""
        logits = self(x)
        if self.packed is not None:
            return native.route(logits, self.chosen)
        if logits.is_cuda:
            from vlmserve_common.kernels.gpu.routing import route  # not where there is no GPU

            return route(logits, self.chosen)
        odds, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(self.chosen, dim=-1)
        return ids, (odds / odds.sum(dim=-1, keepdim=True)).to(x.dtype)


class Experts(nn.Module):
    """down_e(act(gate_e(x)) * up_e(x)) for each expert e; uninitialised, inference only.

    gate_up_proj, gates first, and down_proj lie as the checkpoint has them (see `lay_out`), so that they are read as
    they are; `weights` are always the same.
    """

    gate_up_proj: nn.Parameter | None
    down_proj: nn.Parameter | None

    def __init__(self, count: int, size: int, intermediate_size: int, act: Activation) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * intermediate_size, size), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(count, size, intermediate_size), requires_grad=False)
        self.act = act
        self.layout: ExpertLayout = "outputs_first"
        self.packed: tuple[PackedWeight, PackedWeight] | None = None

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [experts, 2 * intermediate_size, size] and [experts, size, intermediate_size]; there until `pack`."""
        assert self.gate_up_proj is not None
        assert self.down_proj is not None
        if self.layout == "inputs_first":
            return self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return self.gate_up_proj, self.down_proj

    def lay_out(self, layout: ExpertLayout) -> None:
        """Before the weights are filled: as a checkpoint has them."""
        gate_up, down = self.weights
        self.layout = layout
        if layout == "inputs_first":
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self.gate_up_proj = nn.Parameter(gate_up.new_empty(gate_up.shape), requires_grad=False)
        self.down_proj = nn.Parameter(down.new_empty(down.shape), requires_grad=False)

    def pack(self, mode: Mode | None = None) -> None:
        """Lay the weights out for this process's operators, where these can use them; the plain ones go.

        mode: quantised so, where that can be.
        """
        if self.packed is not None or not all(can_pack(weights[0]) for weights in self.weights):
            return
        # one after the other: of the first there is then no more than one
        gate_up, down = self.weights
        count = len(down)
        packed_gate_up = stacked((pack_weight(weight, None, mode, gated=True) for weight in gate_up), count)
        self.gate_up_proj = self.down_proj = None
        del gate_up
        self.packed = packed_gate_up, stacked((pack_weight(weight, None, mode) for weight in down), count)

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights.StoresParametersOtherwise`; by `layout`."""
        for leaf, weights in self.named_parameters(recurse=False):
            if self.layout == "each":
                parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
                for expert, weight in enumerate(weights):
                    for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                        yield f"{name}.{expert}.{part}.weight", piece
            else:
                yield f"{name}.{leaf}", weights

    def stored_so(self, shapes: Mapping[str, tuple[int, ...]]) -> ExpertLayout:
        """The layout of a checkpoint whose experts have tensors of these names and shapes; as published, if they do not
        tell. CheckpointError for quantised ones."""
        for name in shapes:
            if name.rpartition(".")[2] not in ("weight", "gate_up_proj", "down_proj"):
                raise CheckpointError(
                    f"{name}: experts that are quantised in the checkpoint are not supported; take the plain one (on a "
                    "CPU, --quantization int8 or int4 quantises it at the start)"
                )
        if any(name.endswith("_proj.weight") for name in shapes):
            return "each"
        for leaf, weights in zip(("gate_up_proj", "down_proj"), self.weights, strict=True):
            _, outputs, inputs = weights.shape
            if outputs != inputs and shapes.get(leaf) == tuple(weights.shape):
                return "outputs_first"
        return "inputs_first"

    def forward(
        self,
        x: torch.Tensor,
        choice: Choice,
        residual: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """x [N, size] -> residual + the sum of each token's experts, times their scores, [N, size].

        workspace: see `compute.linear.linear`.
        """
        ids, scores = choice
        if self.packed is not None:
            return native.run_experts(x, ids, scores, *self.packed, act=self.act.name, residual=residual)
        if x.is_cuda and self.act.name == "silu":
            from vlmserve_common.kernels.gpu.experts import run_experts  # not where there is no GPU

            return run_experts(x, ids.int(), scores, *self.weights, residual)
        out = self._one_by_one(x, ids, scores, workspace)
        return out if residual is None else out.add_(residual)

    def _one_by_one(
        self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, workspace: Workspace | None
    ) -> torch.Tensor:
        """The experts that are hit, each with all its tokens. A token's sum is in the order of its scores, whatever
        else is in the batch."""
        gate_up, down = self.weights
        chosen = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        rows = x[order // chosen]
        made = torch.empty_like(rows)
        first = 0
        for expert, count in enumerate(ids.flatten().bincount(minlength=len(down)).tolist()):
            if count:
                own = slice(first, first + count)
                gates, rest = linear(rows[own], gate_up[expert], workspace=workspace).chunk(2, dim=-1)
                made[order[own]] = linear(self.act(gates).mul_(rest), down[expert], workspace=workspace)
                first += count
        made = made.view(len(x), chosen, x.shape[1])
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for place in range(chosen):
            total.addcmul_(made[:, place].float(), scores[:, place, None].float())
        return total.to(x.dtype)


class SparseMLP(nn.Module):
    """A router and its experts, under the names of published checkpoints."""

    def __init__(self, size: int, intermediate_size: int, num_experts: int, chosen: int, act: Activation) -> None:
        super().__init__()
        self.gate = Router(size, num_experts, chosen)
        self.experts = Experts(num_experts, size, intermediate_size, act)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, size] -> [N, size], added to `residual`."""
        return self.experts(x, self.gate.choose(x), residual, self.gate.workspace)


def pack_experts(module: nn.Module, mode: Mode | None = None) -> None:
    """Let all `Experts` in `module` use this process's operators; see `Experts.pack`."""
    for child in module.modules():
        if isinstance(child, Experts):
            child.pack(mode)


def choose_layouts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Have all `Experts` in `module`, before they are filled, lie as a checkpoint has them. shapes: of its tensors, by
    our names. CheckpointError for quantised experts."""
    for name, child in module.named_modules():
        if isinstance(child, Experts):
            prefix = f"{name}."
            own = {stored.removeprefix(prefix): shapes[stored] for stored in shapes if stored.startswith(prefix)}
            try:
                child.lay_out(child.stored_so(own))
            except CheckpointError as error:
                raise CheckpointError(f"{prefix}{error}") from None
