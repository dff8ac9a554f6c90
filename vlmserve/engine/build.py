"""Builds the engine of one process: model, pools, runner, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from vision.encoder_pool import EncoderPool
from vision.towers.tower_graphs import capture_on_gpu
from vlmserve.config.engine_args import AUTO, EngineArgs
from vlmserve.config.start_settings import StartSettings
from vlmserve.engine.activations import (
    StepLimits,
    cuda_meter,
    estimate_activations,
    measure_activations,
    step_limits,
)
from vlmserve.engine.decode_graphs import GraphBuilder, GraphPlan, cuda_tools, tools_of_ranks, wanted_sizes
from vlmserve.engine.encoder import build_encoder_pool, encoder_devices, resolve_warmup_patches
from vlmserve.engine.kv_tiers import build_tiers
from vlmserve.engine.loop import EventLoop, GroupPlacement
from vlmserve.engine.picture_limit import SMALLEST_PIXELS, auto_max_pixels
from vlmserve.engine.recurrent import num_states, request_states, state_bytes, state_shape, supported_args
from vlmserve.engine.sharing import expert_sharing
from vlmserve.engine.step import GroupsWorker, ModelWorker, OneGroup
from vlmserve.engine.warm_up import warm_up
from vlmserve.executor.device_queue import DeviceQueue, InlineQueue, StreamQueue, ThreadQueue
from vlmserve.executor.expert_balancer import ExpertBalancer
from vlmserve.executor.logits_processors import load_logits_processors
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import RECENT_TOKENS
from vlmserve.ipc.messages import SchedulerOutput
from vlmserve.ipc.routing.router import Router
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.kv_cache import KVCache, cache_dtype
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.memory.req_to_token import ReqPoolAllocator, ReqToTokenPool
from vlmserve.memory.sizing import (
    Activations,
    check_weights_fit,
    graph_room,
    kv_cache_size,
    quantised_part,
    weight_bytes,
)
from vlmserve.models.attention.base import AttentionBackend
from vlmserve.models.attention.choice import choose_backend
from vlmserve.models.attention.spec import AttentionSpec
from vlmserve.models.random_weights import random_model
from vlmserve.models.registry import load_model, outline_model, quantization_of
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve.scheduler.drafts import NGramDrafter
from vlmserve.scheduler.estimates import NewTokenRatio
from vlmserve.scheduler.grammar.compile_process import CompileProcess, CompilerSettings
from vlmserve.scheduler.grammar.grammar_queue import GrammarQueue
from vlmserve.scheduler.kv_cache_manager import KVCacheManager, Sessions
from vlmserve.scheduler.meter import BatchLog
from vlmserve.scheduler.policy import make_policy
from vlmserve.scheduler.req_media import FairOrder
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve_common.checkpoint.gptq_awq import Scheme
from vlmserve_common.compute.cpus import cpu_name, usable_threads
from vlmserve_common.compute.devices import check_dtype, resolve_device
from vlmserve_common.compute.shard import WHOLE, Shard
from vlmserve_common.compute.tensors import dtype_name, dtype_setting
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.library import activate, active, torch_threads
from vlmserve_common.kernels.quantized import MODE_BITS, Mode

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What others need to know of a running engine. max_req_len: tokens of prompt and answer of one request.
    auto_pixels: what `--max-pixels auto` comes to; None: the checkpoint's own limit."""

    max_total_tokens: int
    max_req_len: int
    device: str
    dtype: str
    auto_pixels: int | None = None


def build_runner(args: EngineArgs, ranks: Ranks | None = None) -> tuple[ModelRunner, EngineInfo]:
    """Load the model and make its pools; everything a worker process needs. CheckpointError, EngineError.

    What cannot fit into memory is refused before weights are loaded. ranks: who has the other parts of the model; the
    first one alone encodes pictures.
    """
    shard = WHOLE if ranks is None else replace(ranks.shard, experts=expert_sharing(args))
    encodes = not args.num_encoders and shard.is_entry
    processors = load_logits_processors(args.logits_processors)
    device, threads = _take_device(args, ranks)
    model = _load(args, device, shard, threads, with_tower=encodes)
    config = model.config
    kv_dtype = cache_dtype(args.kv_cache_dtype, model.dtype)
    per_token = _bytes_per_token(model, kv_dtype)
    max_model_len = args.max_model_len or config.max_position_embeddings
    attn_backend = _attention(args, model, kv_dtype, device)
    attn_backend.reserve(args.max_running_requests, max_model_len + args.page_size)
    auto_pixels = None if not shard.is_entry else auto_max_pixels(args, dtype=model.dtype, device=device)
    limits = step_limits(args, device, max_model_len=max_model_len, auto_pixels=auto_pixels)
    activations = _activations(args, model, attn_backend, limits, device, encodes=encodes)
    new_cache = partial(
        KVCache,
        num_layers=config.num_kv_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
        device=device,
    )
    shape = state_shape(config, model.dtype)
    graph_tools = cuda_tools(device) if ranks is None else tools_of_ranks(cuda_tools(device), ranks)
    graph_builder = GraphBuilder(model=model, attn_backend=attn_backend, tools=graph_tools)
    graph_plan = GraphPlan()
    sizes = wanted_sizes(args, attn_backend, device, config.experts, shard)
    if graph_tools.smallest(len(sizes)):  # attention may differ from rank to rank
        graph_plan = graph_builder.plan(
            sizes,
            kv_cache=new_cache(num_slots=args.page_size),
            max_context_len=max_model_len + args.page_size,
            room=graph_room(args, bytes_per_token=per_token, device=device, activations=activations),
            recurrent_cache=None if shape is None else RecurrentCache(0, shape, device, padded=True),
        )
    padded = bool(graph_plan.sizes)
    activations = replace(activations, graphs=graph_plan.reserved)
    tokens = kv_cache_size(
        args,
        bytes_per_token=per_token,
        max_model_len=max_model_len,
        device=device,
        state_bytes=state_bytes(args, config, model.dtype, max_model_len, padded=padded),
        activations=activations,
    )
    states = 0 if shape is None else num_states(args, shape, max_model_len)
    if ranks is not None:
        tokens, states = ranks.smallest(tokens), ranks.smallest(states)
    max_req_len = min(max_model_len, tokens - args.page_size)
    info = EngineInfo(
        max_total_tokens=tokens,
        max_req_len=max_req_len,
        device=str(device),
        dtype=dtype_name(model.dtype),
        auto_pixels=auto_pixels,
    )
    runner = ModelRunner(
        model=model,
        kv_cache=new_cache(num_slots=tokens + args.page_size),
        req_to_token_pool=ReqToTokenPool(args.max_running_requests, max_req_len + args.page_size, device),
        attn_backend=attn_backend,
        device=device,
        recurrent_cache=None if shape is None else RecurrentCache(states, shape, device, padded=padded),
        logits_processors=processors,
        groups=1 if shard.rank else args.attention_groups,
    )
    graphs = graph_builder.capture(
        graph_plan,
        kv_cache=runner.kv_cache,
        req_to_token_pool=runner.req_to_token_pool,
        recurrent_cache=runner.recurrent_cache,
    )
    if graphs is not None:
        runner.attach_graphs(graphs)
    if device.type == "cuda" and shape is None:  # the steps of its own have no states
        warm_up(runner, with_tower=encodes)
    if args.enable_eplb:
        runner.attach_balancer(ExpertBalancer(model, shard, args.eplb_rebalance_num_iterations))
    log.info(
        "loaded %s: %s on %s, %d KV slots of %d bytes (%s), context %d; computing takes %s",
        args.model,
        info.dtype,
        info.device,
        tokens,
        per_token,
        dtype_name(kv_dtype),
        max_req_len,
        activations,
    )
    return runner, info


def _take_device(args: EngineArgs, ranks: Ranks | None) -> tuple[torch.device, int]:
    """The device, made ready for this thread, and the threads that compute on a CPU."""
    threads = usable_threads(args.num_threads, "--num-threads")
    torch.set_num_threads(threads)
    device = resolve_device(args.device)
    if device.type == "cpu":
        operators = activate(args.cpu_kernels, threads=threads)
        log.info("%s: %d threads, which sleep when there is nothing to do; %s", cpu_name(), threads, operators)
        if ranks is not None:
            ranks.share_memory()
    else:
        torch.cuda.set_device(device)  # of this thread: Triton launches there, in its trial, too
    operators = fused.activate(args.gpu_kernels, device)
    if device.type == "cuda":
        log.info("%s: %s", device, operators)
    return device, threads


def _load(
    args: EngineArgs, device: torch.device, shard: Shard, threads: int, *, with_tower: bool
) -> VisionLanguageModel:
    """This process's part of the model, packed, if it has room. with_tower: encoder processes have it otherwise, and no
    copy of it is needed here."""
    mode = _quantization(args, device)
    _check_sizes(args, device, mode, shard)
    model = _model(args, device, shard, with_tower=with_tower)
    model.pack(mode)
    if device.type == "cpu":
        torch.set_num_threads(torch_threads(threads, model.dtype))
    return model


def _attention(
    args: EngineArgs, model: VisionLanguageModel, kv_dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    config = model.config
    return choose_backend(
        args.attention_backend,
        AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scaling=config.head_dim**-0.5,
            dtype=model.dtype,
            cache_dtype=kv_dtype,
            page_size=args.page_size,
            device=device,
        ),
    )


def _activations(
    args: EngineArgs,
    model: VisionLanguageModel,
    attn_backend: AttentionBackend,
    limits: StepLimits,
    device: torch.device,
    *,
    encodes: bool,
) -> Activations:
    """What computing takes, measured on a GPU."""
    limits = limits if encodes else replace(limits, patches=0)
    if device.type != "cuda":
        return estimate_activations(model, _of_all_groups(limits, args))
    if encodes and not args.disable_vit_cuda_graph:
        capture_on_gpu(model.visual, device)
    return measure_activations(
        model,
        attn_backend,
        replace(limits, rows=limits.rows * args.attention_groups),  # groups are as long as each other in it
        cuda_meter(device),
        cache_dtype(args.kv_cache_dtype, model.dtype),
    )


def _outline(args: EngineArgs, device: torch.device, shard: Shard) -> VisionLanguageModel:
    dtype = dtype_setting(args.dtype)
    if args.load_format == "dummy":
        return random_model(Path(args.model), "meta", dtype, shard=shard)
    return outline_model(Path(args.model), dtype, device, shard=shard)


def _model(args: EngineArgs, device: torch.device, shard: Shard, *, with_tower: bool) -> VisionLanguageModel:
    dtype = dtype_setting(args.dtype)
    if args.load_format == "dummy":
        return random_model(Path(args.model), device, dtype, with_tower=with_tower, shard=shard)
    return load_model(args.model, device=device, dtype=dtype, with_tower=with_tower, shard=shard)


def _quantization(args: EngineArgs, device: torch.device) -> Mode | None:
    """What --quantization comes to here. EngineError on a GPU."""
    if args.quantization == "none":
        return None
    if device.type != "cpu":
        raise EngineError(f"--quantization {args.quantization} is for CPUs, and the model is on {device}")
    if active() is None:
        log.warning("--quantization %s needs our own operators: the weights stay as they are", args.quantization)
        return None
    return args.quantization


def _check_sizes(args: EngineArgs, device: torch.device, mode: Mode | None, shard: Shard) -> None:
    """EngineError for a context that the model was not made for, and for what has no room in memory."""
    outline = _outline(args, device, shard)
    most = outline.config.max_position_embeddings
    max_model_len = args.max_model_len or most
    if max_model_len > most:
        raise EngineError(f"--max-model-len is {max_model_len}; the model was made for {most} tokens")
    check_dtype(outline.dtype, device)
    weights = weight_bytes(outline)
    if args.num_encoders:
        encoder_devices(args, device)  # are there
    if args.num_encoders or not shard.is_entry:
        weights -= weight_bytes(outline.visual)  # which each of them, or the first rank, loads, and this process not
    embedding = outline.language_model.embed_tokens
    if active() is not None and outline.lm_head is None and embedding is not None and shard.stage.is_last:
        # the packed copy that is a tied model's head
        copy = weight_bytes(embedding)
        weights += copy if mode is None else int(copy * quantised_part(MODE_BITS[mode], outline.dtype))
    scheme = quantization_of(Path(args.model))
    if active() is not None and isinstance(scheme, Scheme):
        decoder = weight_bytes(outline.language_model.layers)
        weights -= int(decoder * (1 - quantised_part(scheme.bits, outline.dtype)))
    check_weights_fit(weights, model=args.model, dtype=outline.dtype, device=device)
    # what a CPU's pictures come to is found out later, and is this at the least
    auto_pixels = SMALLEST_PIXELS if args.max_pixels == AUTO and device.type == "cpu" else None
    limits = step_limits(args, device, max_model_len=max_model_len, auto_pixels=auto_pixels)
    kv_cache_size(
        args,
        bytes_per_token=_bytes_per_token(outline, cache_dtype(args.kv_cache_dtype, outline.dtype)),
        max_model_len=max_model_len,
        device=device,
        weights_to_come=weights,
        state_bytes=state_bytes(args, outline.config, outline.dtype, max_model_len),
        activations=estimate_activations(outline, _of_all_groups(limits, args)),
    )


def _of_all_groups(limits: StepLimits, args: EngineArgs) -> StepLimits:
    """Where groups of ranks have tokens of their own, MLPs and sampling are for those of all."""
    groups = args.attention_groups
    return replace(limits, tokens=limits.tokens * groups, rows=limits.rows * groups)


def _bytes_per_token(model: VisionLanguageModel, kv_dtype: torch.dtype) -> int:
    config = model.config
    return KVCache.bytes_per_token(config.num_kv_layers, config.num_kv_heads, config.head_dim, kv_dtype)


def build_loop(
    args: EngineArgs,
    runner: ModelRunner,
    info: EngineInfo,
    send: Callable[[SchedulerOutput], None],
    *,
    start: StartSettings | None = None,
    worker: ModelWorker | GroupsWorker | None = None,
    batch_log: BatchLog | None = None,
) -> EventLoop:
    """Build the event loop over a runner in this process, with a scheduler for each attention group.

    send: gets every step's outputs. start: needed if `args` asks for encoder processes. worker: computes steps, if that
    is not the runner alone; a `GroupsWorker` if there are several groups.
    """
    groups = args.attention_groups
    placement = None
    if groups > 1:
        placement = GroupPlacement(Router(groups, method=args.load_balance_method))
        send = placement.noting(send)
    make_encoder, order = _encoder(args, runner, start), FairOrder()
    schedulers = [_scheduler(args, runner, info, make_encoder, send=send, encoder_order=order) for _ in range(groups)]
    return EventLoop(
        schedulers,
        worker=cast(GroupsWorker, worker) if groups > 1 else OneGroup(cast(ModelWorker, worker or runner)),
        device=_device_queue(args, runner.device, torch.get_num_threads()),  # of this thread; each has its own
        encoder=make_encoder(),
        send=send,
        max_patches=resolve_warmup_patches(args, runner.device),
        placement=placement,
        expert_stats=runner.expert_stats,
        batch_log=batch_log,
    )


def _encoder(args: EngineArgs, runner: ModelRunner, start: StartSettings | None) -> Callable[[], EncoderPool]:
    """Made when it is asked for first, as its processes are to be ended by whoever has it."""
    model = runner.model
    return cache(partial(build_encoder_pool, args, model.visual, dtype=model.dtype, device=runner.device, start=start))


def _scheduler(
    args: EngineArgs,
    runner: ModelRunner,
    info: EngineInfo,
    make_encoder: Callable[[], EncoderPool],
    *,
    send: Callable[[SchedulerOutput], None],
    encoder_order: FairOrder,
) -> Scheduler:
    args = supported_args(args, runner.model.config)
    allocator = TokenToKVPoolAllocator(info.max_total_tokens, args.page_size)
    media_keys = MediaKeyTable()
    prefix_cache, close_cache = build_tiers(
        args,
        runner,
        allocator,
        media_keys,
        bytes_per_token=_bytes_per_token(runner.model, runner.kv_cache.dtype),
    )
    req_pool = ReqPoolAllocator(args.max_running_requests, info.max_req_len + args.page_size)
    kv = KVCacheManager(
        allocator,
        prefix_cache,
        req_pool,
        states=request_states(args, runner, info.max_total_tokens + args.page_size),
        close=close_cache,
    )
    return Scheduler(
        args,
        max_req_len=info.max_req_len,
        eos_token_ids=frozenset(runner.model.config.eos_token_ids),
        kv=kv,
        encoder=make_encoder(),
        policy=make_policy(args.schedule_policy, match=kv.matched_len, path=kv.matched_path, seed=args.random_seed),
        new_token_ratio=NewTokenRatio(args.schedule_conservativeness),
        media_keys=media_keys,
        sessions=Sessions(
            prefix_cache, max_sessions=args.max_sessions, timeout_s=args.session_timeout_s, clock=time.monotonic
        ),
        grammars=_grammars(args, runner),
        send=send,
        encoder_order=encoder_order,
        drafter=NGramDrafter(args.speculative_num_draft_tokens) if args.speculative_algorithm == "ngram" else None,
    )


def _device_queue(args: EngineArgs, device: torch.device, threads: int) -> DeviceQueue:
    """threads: of torch on a CPU. A step for each stage of a pipeline, and one that the first is to begin with next."""
    depth = 1 if args.disable_overlap_schedule else args.pp_size + 1
    assert args.pp_size > 1 or depth <= RECENT_TOKENS, "workers forget what they sampled longer ago"
    if device.type != "cpu":
        return StreamQueue(partial(torch.cuda.set_device, device), depth=depth)
    if args.disable_overlap_schedule:
        return InlineQueue()
    choose_threads = partial(torch.set_num_threads, threads)
    if args.pp_size > 1:
        return ThreadQueue(choose_threads, depth=depth, least_reqs=0)
    return ThreadQueue(choose_threads)


def _grammars(args: EngineArgs, runner: ModelRunner) -> GrammarQueue:
    config = runner.model.config
    settings = CompilerSettings(
        folder=args.model,
        vocab_size=config.vocab_size,
        stop_token_ids=sorted(config.eos_token_ids),
        timeout_s=args.grammar_timeout_s,
    )
    return GrammarQueue(partial(CompileProcess, settings), cache_bytes=args.grammar_cache_mib << 20)
