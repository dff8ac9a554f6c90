"""The memory of GPUs: whether a model fits, and the KV cache that is left, by the engine's rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vlmserve.commands.plan.gpus import Gpu
from vlmserve.commands.plan.layout import Layout, SpreadModel, StageShare
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.activations import StepLimits, estimate_activations, step_limits
from vlmserve.engine.decode_graphs import why_not_captured
from vlmserve.engine.encoder import resolve_max_patches
from vlmserve.engine.recurrent import num_states
from vlmserve.memory.sizing import Activations, gpu_kv_bytes, most_for_graphs
from vlmserve_common.compute.memory import show_gib
from vlmserve_common.compute.shard import ExpertSharing, Shard
from vlmserve_common.compute.stage import Stage as PipelineStage
from vlmserve_common.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The memory of a stage's fullest GPU, in bytes.

    `reserved` is for CUDA and its libraries. `activations` include the most that captured graphs may take. `kv` is left
    for the KV cache, and is below 0 if memory is missing.
    """

    stage: StageShare
    reserved: int
    states: int
    activations: Activations
    kv: float

    @property
    def tokens(self) -> int | None:
        """The KV slots; None if no layer of the stage has any."""
        return max(0, int(self.kv)) // self.stage.kv if self.stage.kv else None


@dataclass(frozen=True, kw_only=True)
class Fits:
    """The memory of all stages. tokens: KV slots of a replica, or of a group of its ranks that share attention."""

    stages: tuple[Fit, ...]
    tokens: int


def fit(model: SpreadModel, layout: Layout, gpu: Gpu, args: EngineArgs, *, context: int, reserved: int) -> Fits:
    """Fit a model into GPUs. Raises EngineError with numbers if the weights or `context` tokens do not fit."""
    device = torch.device("cuda")
    longest = args.max_model_len or model.config.max_position_embeddings
    # what pictures ask for is the tower's limit of patches: a checkpoint's largest picture has no more
    limits = step_limits(replace(args, encoder_dp_size=1), device, max_model_len=longest, auto_pixels=None)
    limits = replace(limits, patches=resolve_max_patches(args, device))
    stages = tuple(_fit(model, stage, layout, gpu, args, limits, longest, reserved) for stage in model.stages)
    tokens = min(stage.tokens for stage in stages if stage.tokens is not None) // args.page_size * args.page_size
    if tokens < max(context, 2 * args.page_size):
        worst = min(stages, key=lambda one: one.kv if one.tokens is None else one.tokens)
        raise EngineError(_complaint(worst, model, layout, gpu, args, context))
    return Fits(stages=stages, tokens=tokens)


def _fit(
    model: SpreadModel,
    stage: StageShare,
    layout: Layout,
    gpu: Gpu,
    args: EngineArgs,
    limits: StepLimits,
    longest: int,
    reserved: int,
) -> Fit:
    own = limits if stage.tower else replace(limits, patches=0)
    activations = replace(estimate_activations(model.outline, own), beside=True)
    if not stage.head_numbers:
        activations = replace(activations, logits=0)
    states = 0 if stage.state is None else (1 + num_states(args, stage.state, longest)) * stage.state.nbytes
    free = gpu.memory - reserved - stage.weights - states
    if _has_graphs(model, layout, args):
        activations = replace(activations, graphs=most_for_graphs(free - activations.peak))
    room = gpu_kv_bytes(free, gpu.memory, computing=activations.peak, mem_fraction_static=args.mem_fraction_static)
    # where computing takes more than there is, that is missing
    kv = min(room, free - activations.peak)
    return Fit(stage=stage, reserved=reserved, states=states, activations=activations, kv=kv)


def _has_graphs(model: SpreadModel, layout: Layout, args: EngineArgs) -> bool:
    sharing = ExpertSharing(ep_size=layout.ep, a2a=args.moe_a2a_backend)
    shard = Shard(0, layout.tp, experts=sharing, stage=PipelineStage(0, layout.pp), group=layout.attention_group)
    return why_not_captured(args, model.config.experts, shard) is None


def _complaint(worst: Fit, model: SpreadModel, layout: Layout, gpu: Gpu, args: EngineArgs, context: int) -> str:
    stage = worst.stage
    where = f"a {gpu.name}" if layout.pp == 1 else f"a {gpu.name} of layers {stage.first} to {stage.last - 1}"
    beside = "".join(f", {part}" for part in _beside(worst))
    every = sum(one.weights for one in model.stages) * layout.tp
    found = (
        f"{where} has {show_gib(gpu.memory)}: weights take {show_gib(stage.weights)}{beside}, computing "
        f"{worst.activations}, and --mem-fraction-static {args.mem_fraction_static:g} leaves "
    )
    if worst.kv <= 0:
        least = -(-every // int(gpu.memory * args.mem_fraction_static))
        return (
            f"the model does not fit: {found}nothing for a KV cache. All weights take about {show_gib(every)}: "
            f"{least} such GPUs at the least"
        )
    tokens = worst.tokens or 0
    return (
        f"no request of {context} tokens (--context) fits: {found}{show_gib(worst.kv)} for the KV cache, {tokens} "
        f"tokens of {stage.kv} bytes"
    )


def _beside(fit: Fit) -> Iterator[str]:
    if fit.states:
        yield f"recurrent states {show_gib(fit.states)} (--max-running-requests, --mamba-cache-mib)"
    yield f"CUDA and its libraries {show_gib(fit.reserved)} (--reserved-gib)"
