"""Builds the engine of one process: model, pools, runner, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import blake3
import torch

from vision.encoder_pool import EncoderPool
from vision.towers.tower_graphs import capture_on_gpu
from vlmserve.config.engine_args import AUTO, EngineArgs, StartSettings
from vlmserve.engine.activation_memory import (
    cuda_meter,
    encoder_bytes,
    estimate_activations,
    measure_activations,
    step_limits,
)
from vlmserve.engine.adapters import make_store
from vlmserve.engine.encoder import auto_max_pixels, build_encoder_pool, resolve_warmup_patches
from vlmserve.engine.graph_planning import GraphBuilder, GraphPlan, Pools, cuda_tools, tools_of_ranks, wanted_sizes
from vlmserve.engine.loop import EventLoop, GroupPlacement
from vlmserve.engine.model_loading import bytes_per_token, load, prepare_device
from vlmserve.engine.recurrent import (
    guessed_tokens,
    num_states,
    recurrent_cache,
    request_states,
    state_bytes,
    state_shape,
    supported_args,
)
from vlmserve.engine.step import GroupsWorker, ModelWorker, OneGroup
from vlmserve.engine.warm_up import warm_up
from vlmserve.engine.windows import keeps_all, window_pool, window_room
from vlmserve.executor.device_queue import DeviceQueue, StreamQueue, ThreadQueue
from vlmserve.executor.expert_balancer import ExpertBalancer
from vlmserve.executor.logits_processors import LogitsProcessors, load_logits_processors
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import RECENT_TOKENS
from vlmserve.ipc.messages import SchedulerOutput
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.kv_cache import KVCache, cache_dtype
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.kv_transfer import KVTransfer
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.recurrent_cache import RecurrentCache, StateShape
from vlmserve.memory.req_to_token import ReqPoolAllocator, ReqToTokenPool
from vlmserve.memory.sizing import (
    Activations,
    WindowRoom,
    embeds_bytes,
    graph_room,
    host_pool_size,
    kv_cache_size,
)
from vlmserve.models.attention.base import AttentionBackend, AttentionSpec
from vlmserve.models.attention.choice import choose_backend
from vlmserve.models.config import ModelConfig
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve.routing.replicas import ReplicaRouter
from vlmserve.scheduler.drafts import make_drafter
from vlmserve.scheduler.grammar.grammar_process import GrammarProcesses, GrammarSettings
from vlmserve.scheduler.grammar.grammar_queue import GrammarQueue
from vlmserve.scheduler.guessing import Guesser
from vlmserve.scheduler.handover import HandedPrompts, Receivers, RemotePrompts, Sender
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.meter import BatchLog
from vlmserve.scheduler.req_media import FairOrder
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve_common.checkpoint.adapter_file import read_adapter
from vlmserve_common.compute.adapter_store import AdapterStore
from vlmserve_common.compute.communicator import ALONE
from vlmserve_common.compute.memory import free_memory
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.kernels import fused

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What other processes need to know about a running engine. max_req_len: tokens of prompt and answer of one
    request. auto_pixels: the result of `--max-pixels auto`; None: the checkpoint's own limit. embeds_bytes: of the
    cache of embeddings on the device."""

    max_total_tokens: int
    max_req_len: int
    device: str
    dtype: str
    auto_pixels: int | None = None
    embeds_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A loaded model with its attention backend, from which a runner is made. max_model_len: tokens. auto_pixels: see
    `EngineInfo`."""

    args: EngineArgs
    ranks: Ranks | None
    device: torch.device
    model: VisionLanguageModel
    attn_backend: AttentionBackend
    draft_backend: AttentionBackend | None
    max_model_len: int
    auto_pixels: int | None

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values in the cache."""
        return cache_dtype(self.args.kv_cache_dtype, self.model.dtype)

    @property
    def state_shape(self) -> StateShape | None:
        """The shape of a request's recurrent state; None for models without recurrent layers."""
        return state_shape(self.model.config, self.model.dtype)

    @property
    def windows(self) -> WindowRoom | None:
        """The room for layers with windows; None if they keep all tokens."""
        return window_room(self.args, self.model, self.max_model_len, self.kv_dtype)

    def kv_cache(self, tokens: int) -> KVCache:
        """Allocate a KV cache of so many tokens, and a dummy page."""
        config, dummy, windows = self.model.config, self.args.page_size, self.windows
        if windows is not None and windows.tokens >= tokens:
            windows = None  # they would spare nothing
        return KVCache(
            num_slots=tokens + dummy,
            windowed=() if windows is None else config.windowed,
            window_slots=0 if windows is None else windows.tokens + dummy,
            num_layers=config.num_kv_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
            further=self.model.further_kv,
        )

    def recurrent_cache(self, num_states: int, *, padded: bool) -> RecurrentCache | None:
        """Allocate so many recurrent states; None for models without recurrent layers."""
        return recurrent_cache(self.args, self.state_shape, num_states, self.device, padded=padded)

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers that all ranks call this with."""
        return number if self.ranks is None else self.ranks.smallest(number)


def build_runner(args: EngineArgs, ranks: Ranks | None = None) -> tuple[ModelRunner, EngineInfo]:
    """Load the model and make its pools: everything that a worker process needs. CheckpointError, EngineError.

    What cannot fit into memory is refused before weights are loaded. ranks: the processes that have the other parts of
    the model; only the first one encodes pictures.
    """
    comm = ALONE if ranks is None else ranks.comm
    encodes = not args.num_encoders and comm.shard.is_entry
    processors = load_logits_processors(args.logits_processors)
    device, threads = prepare_device(args, ranks)
    model = load(args, device, comm, threads, with_tower=encodes)
    encodes = encodes and model.visual.is_there
    store = make_store(args, model) if args.enable_lora else None
    parts = _attention(args, ranks, device, model)
    activations = replace(
        _activations(parts, encodes=encodes),
        embeds=_embeds_bytes(parts),
        encoders=encoder_bytes(args, device, model.towers, model.dtype, comm.shard),
    )
    graph_builder, graph_plan = _plan_graphs(parts, activations, store)
    activations = replace(activations, graphs=graph_plan.reserved)
    tokens, states = _pool_sizes(parts, activations, graph_plan)
    info = EngineInfo(
        max_total_tokens=tokens,
        max_req_len=min(parts.max_model_len, tokens - args.page_size),
        device=str(device),
        dtype=dtype_name(model.dtype),
        auto_pixels=parts.auto_pixels,
        embeds_bytes=activations.embeds,
    )
    runner = _allocate(parts, info, states, graph_plan, processors)
    _attach_host_tier(parts, runner)
    pools = Pools(runner.kv_cache, runner.req_to_token_pool, runner.recurrent_cache)
    if (graphs := graph_builder.capture(graph_plan, pools)) is not None:
        runner.attach_graphs(graphs)
    if device.type == "cuda":
        warm_up(runner, with_tower=encodes)
    if store is not None:
        runner.attach_adapters(store)
    if args.enable_eplb:
        runner.attach_balancer(ExpertBalancer(model, comm, args.eplb_rebalance_num_iterations))
    log.info(
        "loaded %s: %s on %s, %d KV slots of %d bytes (%s)%s, context %d; computing takes %s",
        args.model,
        info.dtype,
        info.device,
        tokens,
        bytes_per_token(model, parts.kv_dtype),
        dtype_name(parts.kv_dtype),
        _about_windows(parts, runner.kv_cache),
        info.max_req_len,
        activations,
    )
    return runner, info


def _about_windows(parts: _Parts, cache: KVCache) -> str:
    windows = parts.windows
    if not parts.model.config.windowed:
        return ""
    if windows is not None and cache.window_slots:
        return f", but {windows.tokens} for the {windows.bytes_per_token} of these bytes in layers with windows"
    why = keeps_all(parts.args) or "windows of all requests take no less (--max-running-requests)"
    return f", also in layers with windows: {why}"


def _attention(args: EngineArgs, ranks: Ranks | None, device: torch.device, model: VisionLanguageModel) -> _Parts:
    """Choose the attention backend, and find out how large requests and pictures may be."""
    config = model.config
    max_model_len = args.max_model_len or config.context_length

    def backend(config: ModelConfig) -> AttentionBackend:
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scaling=config.head_dim**-0.5,
            dtype=model.dtype,
            cache_dtype=cache_dtype(args.kv_cache_dtype, model.dtype),
            page_size=args.page_size,
            device=device,
            windows=bool(config.windowed),
        )
        made = choose_backend(args.attention_backend, spec)
        made.reserve(args.max_running_requests, max_model_len + args.page_size)
        return made

    entry, guesses = model.comm.shard.is_entry, None
    if model.eagle is not None:
        guesses = model.eagle.config.decoder
    elif model.draft is not None:
        guesses = model.draft.config
    return _Parts(
        args=args,
        ranks=ranks,
        device=device,
        model=model,
        attn_backend=backend(config),
        draft_backend=None if guesses is None else backend(guesses),
        max_model_len=max_model_len,
        auto_pixels=auto_max_pixels(args, dtype=model.dtype, device=device) if entry else None,
    )


def _activations(parts: _Parts, *, encodes: bool) -> Activations:
    """Measure on a GPU, or estimate on a CPU, the memory that computing takes beside weights and caches."""
    args, model, device = parts.args, parts.model, parts.device
    limits = step_limits(args, device, max_model_len=parts.max_model_len, auto_pixels=parts.auto_pixels)
    limits = limits if encodes else replace(limits, patches=0)
    if device.type != "cuda":
        return estimate_activations(model, limits.of_all_groups(args))
    if encodes and not args.disable_vit_cuda_graph:
        capture_on_gpu(model.visual, device)
    # the measured step has the tokens of all groups anyway: without sizes, each counts as long as this one
    limits = replace(limits, rows=limits.rows * args.attention_groups)
    return measure_activations(model, parts.attn_backend, limits, cuda_meter(device), parts.kv_dtype)


def _embeds_bytes(parts: _Parts) -> int:
    """Return the bytes for the cache of embeddings, which is at the first rank."""
    model = parts.model
    if not model.comm.shard.is_entry:
        return 0
    width = sum(tower.row_width for tower in model.towers)
    return embeds_bytes(parts.args, row_bytes=width * model.dtype.itemsize, free=free_memory(parts.device)[0])


def _plan_graphs(parts: _Parts, activations: Activations, store: AdapterStore | None) -> tuple[GraphBuilder, GraphPlan]:
    """Decide which decode steps are captured, by a trial over a cache of one page. store: the adapters, if any."""
    args, model, device, ranks = parts.args, parts.model, parts.device, parts.ranks
    tools = cuda_tools(device) if ranks is None else tools_of_ranks(cuda_tools(device), ranks)
    tables = None
    if store is not None and fused.usable(torch.empty(1, dtype=model.dtype, device=device)):
        tables = partial(store.tables, most=args.max_loras_per_batch, device=device)
    builder = GraphBuilder(model=model, attn_backend=parts.attn_backend, tools=tools, adapters=tables)
    sizes = wanted_sizes(args, parts.attn_backend, device, model.config.experts, model.comm.shard)
    if sizes and model.config.index is not None:
        log.warning("decode steps are not captured: sparse attention of %s is planned on the host", model.config.family)
        sizes = ()
    if not tools.smallest(len(sizes)):  # attention may differ from rank to rank
        return builder, GraphPlan()
    per_token = bytes_per_token(model, parts.kv_dtype)
    pools = Pools(
        parts.kv_cache(0),
        ReqToTokenPool(0, parts.max_model_len + args.page_size, device),
        parts.recurrent_cache(0, padded=True),
    )
    room = graph_room(args, bytes_per_token=per_token, device=device, activations=activations)
    return builder, builder.plan(sizes, pools, room=room)


def _pool_sizes(parts: _Parts, activations: Activations, plan: GraphPlan) -> tuple[int, int]:
    """Return how many KV slots and recurrent states there is room for, at the rank with the least room."""
    args, model, shape = parts.args, parts.model, parts.state_shape
    states_take = state_bytes(args, model.config, model.dtype, parts.max_model_len, padded=bool(plan.sizes))
    tokens = kv_cache_size(
        args,
        bytes_per_token=bytes_per_token(model, parts.kv_dtype),
        max_model_len=parts.max_model_len,
        device=parts.device,
        windows=parts.windows,
        state_bytes=states_take,
        activations=activations,
    )
    states = 0 if shape is None else num_states(args, shape, parts.max_model_len)
    return parts.smallest(tokens), parts.smallest(states)


def _allocate(
    parts: _Parts, info: EngineInfo, states: int, plan: GraphPlan, processors: LogitsProcessors
) -> ModelRunner:
    args, device = parts.args, parts.device
    kv_cache, longest = parts.kv_cache(info.max_total_tokens), info.max_req_len + args.page_size
    return ModelRunner(
        model=parts.model,
        kv_cache=kv_cache,
        req_to_token_pool=ReqToTokenPool(args.max_running_requests, longest, device, windows=kv_cache.window_slots > 0),
        attn_backend=parts.attn_backend,
        device=device,
        recurrent_cache=parts.recurrent_cache(states, padded=bool(plan.sizes)),
        logits_processors=processors,
        draft_backend=parts.draft_backend,
        groups=1 if parts.model.comm.shard.rank else args.attention_groups,
    )


def _attach_host_tier(parts: _Parts, runner: ModelRunner) -> None:
    """Give a runner the host tier that the settings ask for. All ranks have as many host slots as the rank with the
    least room. EngineError for memory or a folder that is missing."""
    args = supported_args(parts.args, parts.model.config)
    per_token = bytes_per_token(parts.model, parts.kv_dtype)
    slots = parts.smallest(host_pool_size(args, bytes_per_token=per_token, device=parts.device))
    if not slots:
        return
    storage = None
    if args.hicache_storage_dir is not None:
        storage = KVStorage(
            Path(args.hicache_storage_dir) / _fingerprint(args, runner),
            limit_bytes=int(args.hicache_storage_gib * 2**30),
            bytes_per_token=per_token,
            page_size=args.page_size,
        )
    runner.attach_host_tier(KVTransfer(runner.kv_cache, slots + args.page_size, storage))


def build_loop(
    args: EngineArgs,
    runner: ModelRunner,
    info: EngineInfo,
    send: Callable[[SchedulerOutput], None],
    *,
    start: StartSettings | None = None,
    worker: ModelWorker | GroupsWorker | None = None,
    batch_log: BatchLog | None = None,
    sender: Sender | None = None,
    receivers: Receivers | None = None,
) -> EventLoop:
    """Build the event loop over a runner in this process, with a scheduler for each attention group.

    send: gets every step's outputs. start: needed if `args` asks for encoder processes. worker: computes steps, if that
    is not the runner alone; a `GroupsWorker` if there are several groups. sender, receivers: links to decode
    servers, or to prefill servers.
    """
    if sender is not None:
        send = sender.noting(send)
    groups = args.attention_groups
    placement = None
    if groups > 1:
        router = ReplicaRouter(groups, method=args.load_balance_method, most_answers=args.max_running_requests)
        placement = GroupPlacement(router)
        send = placement.noting(send)
    model, order = runner.model, FairOrder()
    # made when it is first called: its processes end with the caller's scheduler
    make_encoder = cache(
        partial(
            build_encoder_pool,
            args,
            *model.towers,
            dtype=model.dtype,
            device=runner.device,
            space_bytes=info.embeds_bytes,
            start=start,
            adapters=runner.adapters,
        )
    )
    schedulers = [
        _scheduler(
            args,
            runner,
            info,
            make_encoder,
            send=send,
            encoder_order=order,
            sender=sender,
            receivers=receivers,
            group=group,
        )
        for group in range(groups)
    ]
    return EventLoop(
        schedulers,
        worker=cast(GroupsWorker, worker) if groups > 1 else OneGroup(cast(ModelWorker, worker or runner)),
        device=_device_queue(args, runner.device, torch.get_num_threads()),  # of this thread; each has its own
        encoder=make_encoder(),
        send=send,
        max_patches=resolve_warmup_patches(args, runner.device),
        placement=placement,
        peers=sender,
        expert_stats=runner.expert_stats,
        batch_log=batch_log,
    )


def _scheduler(
    args: EngineArgs,
    runner: ModelRunner,
    info: EngineInfo,
    make_encoder: Callable[[], EncoderPool],
    *,
    send: Callable[[SchedulerOutput], None],
    encoder_order: FairOrder,
    sender: Sender | None,
    receivers: Receivers | None,
    group: int,
) -> Scheduler:
    allocator = TokenToKVPoolAllocator(info.max_total_tokens, args.page_size)
    media_keys = MediaKeyTable()
    kv = KVCacheManager(
        allocator,
        _prefix_cache(args, runner.kv_transfer, allocator, media_keys),
        ReqPoolAllocator(args.max_running_requests, info.max_req_len + args.page_size),
        states=request_states(args, runner, info.max_total_tokens + args.page_size),
        windows=window_pool(args, runner, info.max_total_tokens + args.page_size),
    )
    return Scheduler(
        args,
        max_req_len=info.max_req_len,
        eos_token_ids=frozenset(runner.model.config.eos_token_ids),
        kv=kv,
        encoder=make_encoder(),
        media_keys=media_keys,
        grammars=_grammars(args, runner),
        send=send,
        encoder_order=encoder_order,
        guesser=_guesser(args, runner.model.config),
        handed=None if sender is None else HandedPrompts(kv, sender, group=group),
        remote=None if receivers is None else RemotePrompts(kv, receivers, group=group),
    )


def _guesser(args: EngineArgs, config: ModelConfig) -> Guesser:
    drafter = make_drafter(args.speculative_algorithm, args.most_drafts)
    most = args.most_drafts if guessed_tokens(args) or config.linear is None else 0
    return Guesser(drafter, most=most, adapts=args.speculative_num_draft_tokens == AUTO)


def _device_queue(args: EngineArgs, device: torch.device, threads: int) -> DeviceQueue:
    """Make the queue of steps. threads: of torch on a CPU. It holds a step for each stage of a pipeline, and the one
    that the first stage begins with next."""
    depth = 1 if args.disable_overlap_schedule else args.pp_size + 1
    assert args.pp_size > 1 or depth <= RECENT_TOKENS, "workers forget what they sampled longer ago"
    if device.type != "cpu":
        return StreamQueue(partial(torch.cuda.set_device, device), depth=depth)
    if args.disable_overlap_schedule:
        return DeviceQueue()
    choose_threads = partial(torch.set_num_threads, threads)
    if args.pp_size > 1:
        return ThreadQueue(choose_threads, depth=depth, least_reqs=0)
    return ThreadQueue(choose_threads)


def _grammars(args: EngineArgs, runner: ModelRunner) -> GrammarQueue:
    config = runner.model.config
    settings = GrammarSettings(
        folder=args.model,
        vocab_size=config.vocab_size,
        stop_token_ids=sorted(config.eos_token_ids),
        timeout_s=args.grammar_timeout_s,
    )
    return GrammarQueue(GrammarProcesses(settings), cache_bytes=args.grammar_cache_mib << 20)


def _prefix_cache(
    args: EngineArgs, transfer: KVTransfer | None, allocator: TokenToKVPoolAllocator, media_keys: MediaKeyTable
) -> RadixCache:
    """Build the prefix cache of a group. transfer: to and from its host tier, if there is one."""
    if transfer is None:
        return RadixCache(allocator, policy=args.radix_eviction_policy, shares=not args.disable_radix_cache)
    return HiRadixCache(
        allocator,
        TokenToKVPoolAllocator(transfer.host_slots - args.page_size, args.page_size),
        policy=args.radix_eviction_policy,
        write_policy=args.hicache_write_policy,
        storage=transfer.storage,
        identity=media_keys.identity,
        transfer=transfer,
    )


def _fingerprint(args: EngineArgs, runner: ModelRunner) -> str:
    """Digest everything that KV depends on: weights, how they are computed with, and the cache's dtype and page
    size."""
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for path in sorted(Path(args.model).glob("*")):
        if path.suffix in (".safetensors", ".json"):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update_mmap(path)
    if args.merged_adapter is not None:
        digest.update(read_adapter(args.merged_adapter, max_rank=args.max_lora_rank).digest.encode())
    kept = (args.quantization, dtype_name(runner.model.dtype), dtype_name(runner.kv_cache.dtype), args.page_size)
    digest.update(repr(kept).encode())
    return digest.hexdigest(length=16)
