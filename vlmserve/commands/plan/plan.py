"""A plan: whether a model fits on GPUs by the engine's rules, and the least times of steps there.

A time is bytes over the bandwidth, operations over the rate, and exchanges over the links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vlmserve.commands.plan.gpus import Gpu
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.activation_memory import estimate_activations, guess_logits, step_limits
from vlmserve.engine.encoder import resolve_max_patches
from vlmserve.engine.graph_planning import why_not_captured
from vlmserve.engine.model_loading import attach_guessing, for_heads
from vlmserve.engine.recurrent import bytes_of_states, check_supported, state_shape
from vlmserve.engine.windows import window_tokens
from vlmserve.memory.kv_cache import KVCache, KVShape, cache_dtype
from vlmserve.memory.recurrent_cache import StateShape
from vlmserve.memory.sizing import (
    Activations,
    WindowRoom,
    cpu_kv_bytes,
    embeds_bytes,
    gpu_kv_bytes,
    kv_tokens,
    most_for_graphs,
    quantised_part,
    weight_bytes,
)
from vlmserve.models.config import ModelConfig
from vlmserve.models.floors import attention_flops, expert_bytes, part_hit, table_bytes, tower_flops
from vlmserve.models.registry import load_config, make_model, quantization_of
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.fp8 import Fp8Scheme
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.checkpoint.schemes import Scheme
from vlmserve_common.checkpoint.weights import linears_of
from vlmserve_common.compute.memory import show_gib
from vlmserve_common.compute.shard import ExpertSharing, PipelineStage, Shard
from vlmserve_common.compute.tensors import dtype_setting
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.quantized import MODE_BITS


@dataclass(frozen=True, kw_only=True)
class StageShare:
    """The share of a pipeline stage's fullest GPU, the first one: layers `first` .. `last` - 1.

    `embedding` (with tables of n-grams), `dense` (layers without experts), `experts`, `head` (0 if it is the embedding)
    and `tower` are bytes. `kv` is the bytes of a token over `kv_layers` layers, of which `index_kv` are of sparse
    attention's index, and `state` the state of a request. `windows` is what layers with windows keep; None: all tokens.
    The `*_numbers` count weights that tokens are multiplied by.
    """

    first: int
    last: int
    embedding: int
    dense: int
    experts: int
    head: int
    tower: int
    kv: int
    index_kv: int
    windows: WindowRoom | None
    state: StateShape | None
    kv_layers: int
    dense_numbers: int
    expert_numbers: int
    head_numbers: int

    @property
    def weights(self) -> int:
        """The bytes of all weights."""
        return self.embedding + self.dense + self.experts + self.head + self.tower


@dataclass(frozen=True, kw_only=True)
class SpreadModel:
    """A model spread over GPUs.

    `config` and `parameters` are of the whole model, `outline` is one rank's, and `stages` are those of the pipeline.
    `active` counts the parameters that a token goes through, without embedding and tower.
    """

    config: ModelConfig
    outline: VisionLanguageModel
    scheme: Scheme | Fp8Scheme | None
    stages: tuple[StageShare, ...]
    kv_dtype: torch.dtype
    parameters: int
    active: int


def lay_out(folder: Path, args: EngineArgs, *, on_cpu: bool = False) -> SpreadModel:
    """Spread the model of a folder, which needs config.json only, as `args` says. Raises what `load_model` raises.

    on_cpu: the operators there keep a copy of an embedding that is the head, too.
    """
    hf_config, scheme = read_hf_config(folder), quantization_of(folder)
    # exchanges of experts have no weights
    shard = Shard(
        0, args.tp_size, experts=ExpertSharing(ep_size=args.ep_size, a2a="none"), groups=args.attention_groups
    )
    heads = for_heads(args)
    config, part = load_config(folder, **heads), load_config(folder, shard, **heads)
    meta, dtype = torch.device("meta"), dtype_setting(args.dtype) or config.dtype
    whole, outline = (make_model(hf_config, one, meta, dtype) for one in (config, part))
    check_supported(args, config)
    attach_guessing(args, outline, "meta")
    embedding, norm = outline.language_model.embed_tokens, outline.language_model.norm
    assert embedding is not None, "the outline is of all layers"
    assert norm is not None
    head = outline.lm_head or embedding
    embeds_last = config.embeds_last and outline.lm_head is not None
    held = _part_held(scheme, dtype)
    layers = outline.language_model.layers
    experts = [expert_bytes(layer) // args.tp_size for layer in whole.language_model.layers]
    held_experts = [size * _held_of_experts(scheme, index, held) for index, size in enumerate(experts)]
    tables = [table_bytes(layer) for layer in layers]
    dense = [_dense_held(layer, index, scheme, held) for index, layer in enumerate(layers)]
    numbers = [_numbers(layer) for layer in layers]
    held_guessing = 1.0 if isinstance(scheme, Scheme) else held  # which AWQ and GPTQ leave as it is
    kv_dtype = cache_dtype(args.kv_cache_dtype, dtype)
    per_layer = KVCache.bytes_per_token(1, outline.config.num_kv_heads, outline.config.head_dim, kv_dtype)
    window_size = window_tokens(args, config, args.max_model_len or config.context_length)
    towers = sum(weight_bytes(tower) for tower in outline.towers)
    stages = []
    for stage in range(args.pp_size):
        staged = replace(config, shard=Shard(stage=PipelineStage(stage, args.pp_size)))
        staged.of_part()  # which refuses layers that cannot be a stage
        first, last = staged.own_layers.start, staged.own_layers.stop
        begins, ends = first == 0, last == config.num_layers
        kv_layers = last - first
        if config.linear is not None:
            kv_layers -= sum(first <= layer < last for layer in config.linear.layers)
        guesses = begins if outline.draft is not None else ends  # see `attach_guessing`
        guessing = [part for part in (outline.mtp, outline.eagle, outline.draft) if guesses and part is not None]
        own_towers = (towers - weight_bytes(outline.visual)) * guesses
        ngrams = config.ngrams
        ngram_layers = 0 if ngrams is None else sum(first <= layer < last for layer in ngrams.layers)
        state = _state(outline, last - first - kv_layers, ngram_layers, ends=ends)
        kv_layers += config.mtp_layers if ends else 0
        index_kv = 0 if config.index is None else kv_layers * KVShape(1, config.index.head_dim).nbytes(kv_dtype)
        tied_here = outline.lm_head is None and begins and not on_cpu
        stages.append(
            StageShare(
                first=first,
                last=last,
                embedding=(weight_bytes(embedding) if begins or (ends and embeds_last) else 0)
                + sum(tables[first:last]),
                dense=int(sum(dense[first:last]) + (sum(map(weight_bytes, guessing)) - own_towers) * held_guessing)
                + (weight_bytes(norm) if ends else 0),
                experts=int(sum(held_experts[first:last])),
                head=weight_bytes(head) if ends and not tied_here else 0,
                tower=towers if begins else 0,
                kv=kv_layers * per_layer
                + index_kv
                + sum(one.nbytes(kv_dtype) for one in outline.guessing_kv) * guesses,
                index_kv=index_kv,
                windows=WindowRoom(window_size, sum(first <= layer < last for layer in config.windowed) * per_layer)
                if window_size
                else None,
                state=state,
                kv_layers=kv_layers,
                dense_numbers=sum(numbers[first:last]),
                expert_numbers=sum(experts[first:last]) // dtype.itemsize,
                head_numbers=weight_bytes(head) // dtype.itemsize if ends else 0,
            )
        )
    return SpreadModel(
        config=config,
        outline=outline,
        scheme=scheme,
        stages=tuple(stages),
        kv_dtype=kv_dtype,
        parameters=sum(parameter.numel() for parameter in whole.parameters()),
        active=_active(whole),
    )


def _part_held(scheme: Scheme | Fp8Scheme | None, dtype: torch.dtype) -> float:
    """Return the bytes of quantised layers as a part of their bytes in `dtype`."""
    if isinstance(scheme, Scheme):
        return quantised_part(scheme.bits, dtype, beside=32 / scheme.group if scheme.group else 0)
    if isinstance(scheme, Fp8Scheme):
        return quantised_part(8, dtype, beside=32 / math.prod(scheme.block) if scheme.block else 0)
    return 1.0


def _dense_held(layer: nn.Module, index: int, scheme: Scheme | Fp8Scheme | None, held: float) -> float:
    """Return the bytes of a layer without its experts and tables, as it is held."""
    every = weight_bytes(layer) - expert_bytes(layer) - table_bytes(layer)
    if not isinstance(scheme, Scheme):
        return every * held
    quantised = sum(
        piece.view.nbytes
        for _, linear, pieces in linears_of(layer)
        for piece in pieces
        if linear.may_be_quantised and not scheme.is_plain(f"layers.{index}.{piece.name.removesuffix('.weight')}")
    )
    return every - quantised * (1 - held)


def _held_of_experts(scheme: Scheme | Fp8Scheme | None, index: int, held: float) -> float:
    """Return the part of a layer's experts' bytes that is held."""
    plain = isinstance(scheme, Scheme) and scheme.is_plain(f"layers.{index}.mlp.experts.0.gate_proj")
    return 1.0 if plain else held


def _numbers(layer: nn.Module) -> int:
    every = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    itemsize = next(layer.parameters()).dtype.itemsize
    return every - (expert_bytes(layer) + table_bytes(layer)) // itemsize


def _state(outline: VisionLanguageModel, layers: int, ngram_layers: int, *, ends: bool) -> StateShape | None:
    shape = state_shape(outline.config, outline.dtype)
    if shape is None or not layers:
        return None
    conv, recurrent = ((layers, *part[1:]) for part in (shape.conv, shape.recurrent))
    shape = replace(shape, conv=conv, recurrent=recurrent, hidden=shape.hidden * ends)
    if not ngram_layers:
        return replace(shape, ngram_conv=(0, 0, 0), ngram_ids=0)
    return replace(shape, ngram_conv=(ngram_layers, *shape.ngram_conv[1:]))


def _active(whole: VisionLanguageModel) -> int:
    config, decoder = whole.config, whole.language_model
    head = whole.lm_head or decoder.embed_tokens
    counted = [part for part in (decoder.layers, decoder.norm, head) if part is not None]
    every = sum(parameter.numel() for part in counted for parameter in part.parameters())
    every -= table_bytes(decoder.layers) // whole.dtype.itemsize
    if config.experts is None:
        return every
    passed_by = 1 - config.experts.chosen / config.experts.count
    return every - round(expert_bytes(decoder.layers) // whole.dtype.itemsize * passed_by)


_TOKENS = 8192
PICTURE = 1024
"""The side of the picture whose time in the tower is told, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The memory of a stage's fullest GPU, in bytes.

    `reserved` is for CUDA and its libraries. `activations` include the most that captured graphs may take, and the
    cache of embeddings. `kv` is left for the KV cache, and is below 0 if memory is missing.
    """

    stage: StageShare
    reserved: int
    states: int
    activations: Activations
    kv: float

    @property
    def tokens(self) -> int | None:
        """The KV slots; None if no layer of the stage has any."""
        return kv_tokens(max(0, int(self.kv)), self.stage.kv, self.stage.windows) if self.stage.kv else None


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of a step: the seconds of all its stages, and of the slowest one.

    `exchange_seconds` is the part in which GPUs wait for results of other GPUs. `bytes_read` is for the GPU that reads
    most. `tokens_per_second` is for all GPUs, with as many steps under way as there are stages.
    """

    seconds: float
    slowest_stage_seconds: float
    exchange_seconds: float
    bytes_read: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """What servers of different roles send each other, over `link` bytes a second between two of them.

    `kv` is in bytes: KV and state of a request of `Plan.context` tokens, from a prefill to a decode server, of which
    each GPU reads its own heads. `picture`: bytes of a picture's embeddings, from an encode server. `most`: bytes of KV
    a second, if prompts are computed as fast as can be. `tower`: bytes that a GPU has more if it encodes nothing.
    """

    link: float
    kv: int
    picture: int
    most: float
    tower: int

    @property
    def kv_seconds(self) -> float:
        """The seconds for a request's KV."""
        return self.kv / self.link

    @property
    def picture_seconds(self) -> float:
        """The seconds for a picture's embeddings."""
        return self.picture / self.link


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory of all stages, and floors of times.

    `tokens` are the KV slots of a replica, or of a group of its ranks that share attention. `decode` has floors by
    requests of `context` tokens each, None if these do not fit. `prefill` is the floor of `prompt` tokens. `picture` is
    in seconds. The cache of embeddings holds so many `pictures`. `hand_over` is for servers of different roles.
    """

    model: SpreadModel
    args: EngineArgs
    gpu: Gpu
    context: int
    prompt: int
    stages: tuple[Fit, ...]
    tokens: int
    decode: dict[int, Floor | None]
    prefill: Floor
    picture: float
    pictures: int
    hand_over: HandOver | None
    notes: tuple[str, ...]


def make_plan(
    args: EngineArgs,
    gpu: Gpu,
    *,
    context: int | None,
    batches: Sequence[int],
    prompt: int | None,
    reserved: int,
    server_link: float = 0.0,
) -> Plan:
    """Make the plan of the folder `args.model`, which has a config.json.

    `batches` are requests that decode together, of `context` tokens each; None: as many as requests may have, 8192 at
    the most, and the same for `prompt`. CUDA and its libraries take `reserved` bytes of each GPU. Servers send each
    other `server_link` bytes a second; 0: nothing. Raises EngineError with numbers for what cannot be, and
    CheckpointError for a wrong config.json.
    """
    if args.quantization != "none" and not gpu.is_cpu:
        raise EngineError(f"--quantization {args.quantization} is for CPUs: --gpu cpu plans for this machine's")
    model = lay_out(Path(args.model), args, on_cpu=gpu.is_cpu)
    longest = args.max_model_len or model.config.context_length
    context, prompt = (min(_TOKENS, longest) if given is None else given for given in (context, prompt))
    if context > longest:
        raise EngineError(f"--context is {context}, and requests have {longest} tokens at the most")
    stages = _fit(model, gpu, args, longest, reserved)
    tokens = min(stage.tokens for stage in stages if stage.tokens is not None) // args.page_size * args.page_size
    if len(model.config.windowed) == model.config.num_layers:  # and none keeps what would take memory
        tokens = min(tokens, args.max_running_requests * (longest + args.page_size))
    if tokens < max(context, 2 * args.page_size):
        worst = min(stages, key=lambda one: one.kv if one.tokens is None else one.tokens)
        raise EngineError(_complaint(worst, model, gpu, args, context))
    times = _Times(model, args, gpu)
    room = tokens // context * args.attention_groups
    prefill = times.prefill(prompt)
    return Plan(
        model=model,
        args=args,
        gpu=gpu,
        context=context,
        prompt=prompt,
        stages=stages,
        tokens=tokens,
        decode={batch: times.decode(batch, context) if batch <= room else None for batch in batches},
        prefill=prefill,
        picture=times.picture(PICTURE),
        pictures=stages[0].activations.embeds // (_row_bytes(model) * _tokens_of(model, PICTURE) or 1),
        hand_over=_hand_over(model, stages[0], args, context, prefill, server_link) if server_link else None,
        notes=tuple(_notes(model, args)),
    )


def _hand_over(model: SpreadModel, first: Fit, args: EngineArgs, context: int, prefill: Floor, link: float) -> HandOver:
    ranks = args.tp_size // args.attention_groups
    a_token = ranks * sum(stage.kv for stage in model.stages)
    states = ranks * sum(stage.state.nbytes for stage in model.stages if stage.state is not None)
    return HandOver(
        link=link,
        kv=context * a_token + states,
        picture=_row_bytes(model) * _tokens_of(model, PICTURE),
        most=prefill.tokens_per_second * a_token,
        tower=first.stage.tower + first.activations.tower,
    )


def _fit(model: SpreadModel, gpu: Gpu, args: EngineArgs, longest: int, reserved: int) -> tuple[Fit, ...]:
    """Return the memory of each stage. longest: tokens of a request."""
    device = torch.device("cpu" if gpu.is_cpu else "cuda")
    # what pictures ask for is the tower's limit of patches: a checkpoint's largest picture has no more
    limits = step_limits(replace(args, encoder_dp_size=1), device, max_model_len=longest, auto_pixels=None)
    sharing = ExpertSharing(ep_size=args.ep_size, a2a=args.moe_a2a_backend)
    pipeline = PipelineStage(0, args.pp_size)
    shard = Shard(0, args.tp_size, experts=sharing, stage=pipeline, groups=args.attention_groups)
    captured = not gpu.is_cpu and why_not_captured(args, model.config.experts, shard) is None
    fits = []
    for stage in model.stages:
        own = replace(limits, patches=resolve_max_patches(args, device) if stage.tower else 0)
        activations = replace(estimate_activations(model.outline, own), beside=not gpu.is_cpu)
        if not stage.head_numbers:
            activations = replace(activations, logits=0 if stage.first else guess_logits(model.outline, own.rows))
        states = 0 if stage.state is None else bytes_of_states(args, stage.state, longest)
        free = gpu.memory - reserved - stage.weights - states
        if stage.tower:
            embeds = embeds_bytes(args, row_bytes=_row_bytes(model), free=free + states)
            activations = replace(activations, embeds=embeds)
        if captured:
            activations = replace(activations, graphs=most_for_graphs(free - activations.peak))
        left, fraction = free - activations.peak, args.mem_fraction_static
        if gpu.is_cpu:
            room = cpu_kv_bytes(args, left)
        else:
            room = gpu_kv_bytes(free, gpu.memory, computing=activations.peak, mem_fraction_static=fraction)
        # where computing takes more than there is, that is missing
        kv = min(room, left)
        fits.append(Fit(stage=stage, reserved=reserved, states=states, activations=activations, kv=kv))
    return tuple(fits)


def _row_bytes(model: SpreadModel) -> int:
    """Return the bytes of one token's embedding, DeepStack's included."""
    return sum(tower.row_width for tower in model.outline.towers) * model.outline.dtype.itemsize


def _tokens_of(model: SpreadModel, side: int) -> int:
    """Return the tokens of a picture of side x side pixels."""
    tower = model.outline.visual
    if not tower.is_there:
        return 0
    return int(side // (tower.patch_embed.proj.kernel[-1] * tower.spatial_merge_size)) ** 2


def _complaint(worst: Fit, model: SpreadModel, gpu: Gpu, args: EngineArgs, context: int) -> str:
    stage = worst.stage
    where = f"a {gpu.name}" if args.pp_size == 1 else f"a {gpu.name} of layers {stage.first} to {stage.last - 1}"
    states = f"recurrent states {show_gib(worst.states)} (--max-running-requests, --mamba-cache-mib), "
    reserved = f"CUDA and its libraries {show_gib(worst.reserved)} (--reserved-gib), "
    found = (
        f"{where} has {show_gib(gpu.memory)}: weights take {show_gib(stage.weights)}, {states if worst.states else ''}"
        f"{reserved if worst.reserved else ''}computing {worst.activations}, and --mem-fraction-static "
        f"{args.mem_fraction_static:g} leaves "
    )
    if worst.kv <= 0:
        every = sum(one.weights for one in model.stages) * args.tp_size
        least = -(-every // int(gpu.memory * args.mem_fraction_static))
        beside = "" if gpu.is_cpu else f". All weights take about {show_gib(every)}: {least} such GPUs at the least"
        return f"the model does not fit: {found}nothing for a KV cache{beside}"
    return (
        f"no request of {context} tokens (--context) fits: {found}{show_gib(worst.kv)} for the KV cache, "
        f"{worst.tokens or 0} tokens of {stage.kv} bytes"
    )


class _Times:
    """The times of a model that is spread over GPUs. Exchanges count if the GPU's link is known."""

    def __init__(self, model: SpreadModel, args: EngineArgs, gpu: Gpu) -> None:
        self._model, self._args, self._gpu = model, args, gpu
        scheme = model.scheme
        in_8_bits = isinstance(scheme, Fp8Scheme) and scheme.inputs is not None and gpu.fp8_flops
        self._rate = gpu.fp8_flops if in_8_bits else gpu.flops
        mode = args.quantization  # which only CPUs have
        self._read = 1.0 if mode == "none" else quantised_part(MODE_BITS[mode], model.outline.dtype)

    def decode(self, batch: int, context: int) -> Floor:
        """Return the floor of a step of `batch` requests of a replica with `context` tokens each."""
        mine = -(-batch // self._args.attention_groups)
        outline, config = self._model.outline, self._model.config
        hit, index = part_hit(self._model.config.experts, batch), outline.config.index
        seen = context if index is None else min(context, index.most)
        work = []
        for stage in self._model.stages:
            state = 0 if stage.state is None else stage.state.nbytes
            read = stage.dense + stage.experts * hit + stage.head_numbers * outline.dtype.itemsize
            passed = 0 if stage.windows is None else max(0, seen - config.window) * stage.windows.bytes_per_token
            read = read * self._read + mine * (seen * (stage.kv - stage.index_kv) - passed + state)
            if index is not None:  # the key of each block
                read += mine * context * stage.index_kv / 2 / index.block
            attention = 4.0 * stage.kv_layers * outline.config.num_heads * outline.config.head_dim * seen * mine
            work.append((stage, read, attention))
        return self._floor(work, tokens=mine, rows=mine, all_tokens=batch)

    def prefill(self, tokens: int) -> Floor:
        """Return the floor of a prompt of `tokens` tokens in each group of a replica's ranks."""
        all_tokens = self._args.attention_groups * tokens
        hit, config = part_hit(self._model.config.experts, all_tokens), self._model.outline.config
        work = [
            (stage, stage.dense + stage.experts * hit, attention_flops(config, stage.kv_layers, tokens))
            for stage in self._model.stages
        ]
        return self._floor(work, tokens=tokens, rows=1, all_tokens=all_tokens)

    def picture(self, side: int) -> float:
        """Return the seconds of a picture of side x side pixels in the tower, which one GPU computes."""
        tower = self._model.outline.visual
        if not tower.is_there:
            return 0.0
        patch = tower.patch_embed.proj.kernel[-1]
        return tower_flops(tower, 1, (side // patch) ** 2) / self._gpu.flops

    def _floor(
        self, work: Sequence[tuple[StageShare, float, float]], *, tokens: int, rows: int, all_tokens: int
    ) -> Floor:
        """Return the floor of a step.

        `work` has each stage, the bytes that it reads, and the operations of its attention. A GPU's group has `tokens`
        in its layers and `rows` at the head. All groups have `all_tokens`.
        """
        gpu, groups, experts = self._gpu, self._args.attention_groups, self._model.config.experts
        used = 0.0 if experts is None else experts.chosen / experts.count
        exchange = [self._exchange(stage, tokens, rows, all_tokens) for stage, _, _ in work]
        seconds = []
        for (stage, read, attention), exchanging in zip(work, exchange, strict=True):
            products = stage.dense_numbers * tokens + stage.expert_numbers * used * all_tokens
            computing = 2 * products / self._rate + (2 * stage.head_numbers * rows * groups + attention) / gpu.flops
            seconds.append(max(read / gpu.bandwidth, computing) + exchanging)
        return Floor(
            seconds=sum(seconds),
            slowest_stage_seconds=max(seconds),
            exchange_seconds=sum(exchange),
            bytes_read=max(read for _, read, _ in work),
            tokens_per_second=self._args.num_replicas * all_tokens / max(seconds),
        )

    def _exchange(self, stage: StageShare, tokens: int, rows: int, all_tokens: int) -> float:
        """Return the seconds of a stage's exchanges.

        These are two sums a layer over all ranks that share it, one sum of embeddings, and the logits for the first
        rank. Groups share all but attention: that part gathers the tokens of all groups and scatters their sums.
        """
        if not self._gpu.link:
            return 0.0
        tp, groups, config = self._args.tp_size, self._args.attention_groups, self._model.config
        row, stream = (size * self._model.outline.dtype.itemsize for size in (config.hidden_size, config.stream_size))
        layers = stage.last - stage.first
        moved = layers * _all_reduce(tp // groups) * tokens * row
        moved += (layers + (stage.first == 0)) * _all_reduce(tp) * all_tokens * row
        if stage.head_numbers:
            moved += (1 - 1 / tp) * rows * groups * config.vocab_size * 4
        if stage.first:
            moved += tokens * stream
        return moved / self._gpu.link


def _all_reduce(ranks: int) -> float:
    """Return what each rank sends of every byte: a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks


def _notes(model: SpreadModel, args: EngineArgs) -> Iterator[str]:
    experts, scheme, heads = model.config.experts, model.scheme, model.config.num_kv_heads
    ranks = args.tp_size // args.attention_groups
    if ranks > heads:
        yield f"{heads} KV heads on {ranks} ranks: each is held {ranks // heads} times"
    if experts is not None:
        yield "experts that are hit: as many as if chance chose them, evenly over the GPUs"
    if experts is not None and isinstance(scheme, Fp8Scheme) and scheme.block:
        part = experts.intermediate_size * args.ep_size // args.tp_size
        if part % scheme.block[0]:
            yield (
                f"{part} of an expert's {experts.intermediate_size} inner elements on each GPU are no multiple of the "
                f"{scheme.block[0]} that share a scale: take a larger --ep"
            )
