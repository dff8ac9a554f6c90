"""Captured decode steps within the memory that there is.

They hold the addresses of the KV cache, so they are captured when it is there; and what they take must be kept free
when it is sized. So the largest two are captured before, over a cache of one page, which shows what all will take; the
cache is sized by that, and the steps are captured for good.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vlmserve.attention.base import AttentionBackend
from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.graphs.decode import DecodeGraphs
from vlmserve.executor.graphs.sizes import GraphCost, affordable, chosen_sizes, shown
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.graphs import Capturer, CudaCapturer
from vlmserve_common.compute.memory import free_memory, show_gib

log = logging.getLogger(__name__)

# A driver takes memory in chunks, so that the second graph may seem to take none.
_LEAST_MORE = 8 << 20


@dataclass(frozen=True, kw_only=True)
class GraphTools:
    """A GPU's, or a test's. new_capturer: with memory of its own. free: bytes, with nothing that is only kept."""

    new_capturer: Callable[[], Capturer]
    free: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """sizes: requests of the steps to capture. reserved: bytes that they may take."""

    sizes: tuple[int, ...] = ()
    reserved: int = 0


def cuda_tools(device: torch.device) -> GraphTools:
    """Of a GPU."""

    def free() -> int:
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        return free_memory(device)[0]

    return GraphTools(new_capturer=partial(CudaCapturer, device), free=free)


def wanted_sizes(
    args: EngineArgs, attn_backend: AttentionBackend, device: torch.device, *, alone: bool = True
) -> tuple[int, ...]:
    """Steps to capture if memory allows it; none on a CPU, and where a line in the log says why. alone: whether this
    process has the whole model."""
    if device.type != "cuda":
        return ()
    if not alone:
        log.info("decode steps are not captured as CUDA graphs: ranks exchange sums in the midst of them")
        return ()
    if args.disable_cuda_graph:
        log.info("decode steps are not captured as CUDA graphs: --disable-cuda-graph")
        return ()
    if not attn_backend.can_capture:
        log.info(
            "decode steps are not captured as CUDA graphs: %s reads the table on the host (--attention-backend)",
            type(attn_backend).__name__,
        )
        return ()
    return chosen_sizes(
        max_running_requests=args.max_running_requests, given=args.cuda_graph_sizes, most=args.cuda_graph_max_bs
    )


def plan_graphs(sizes: tuple[int, ...], cost: GraphCost, room: int) -> GraphPlan:
    """Which of them are to be captured in `room` bytes; a line in the log where these are not all."""
    chosen = affordable(sizes, cost, room)
    if len(chosen) < len(sizes):
        log.warning(
            "capturing decode steps of %s requests takes %s, and there is room for %s: %s "
            "(settings: --cuda-graph-bs, --cuda-graph-max-bs, --max-total-tokens)",
            shown(sizes),
            show_gib(cost.of(len(sizes))),
            show_gib(room),
            f"only those of {shown(chosen)} are captured" if chosen else "none is captured",
        )
    return GraphPlan(sizes=chosen, reserved=cost.of(len(chosen)))


@dataclass(frozen=True, kw_only=True)
class GraphBuilder:
    """Captures a model's decode steps, first for a trial and then for good."""

    model: VisionLanguageModel
    attn_backend: AttentionBackend
    tools: GraphTools

    def plan(
        self,
        sizes: tuple[int, ...],
        *,
        kv_cache: KVCache,
        max_context_len: int,
        room: int,
        recurrent_cache: RecurrentCache | None = None,
    ) -> GraphPlan:
        """Which of `sizes` (one at least) to capture in `room` bytes. kv_cache: of a page. max_context_len: of the
        request table. recurrent_cache: of no states, for models that have such layers."""
        pool = ReqToTokenPool(0, max_context_len, kv_cache.layers[0].keys.device)
        try:
            cost = self._trial(sizes, kv_cache, pool, recurrent_cache)
        except Exception as error:  # a compiler's, too: without graphs it is slower, and that is all
            _warn(sizes, error)
            return GraphPlan()
        finally:
            self.tools.free()  # what the trial took
        return plan_graphs(sizes, cost, room)

    def _trial(
        self, sizes: tuple[int, ...], kv_cache: KVCache, pool: ReqToTokenPool, recurrent_cache: RecurrentCache | None
    ) -> GraphCost:
        before = self.tools.free()
        graphs = self._graphs(sizes[-1], kv_cache, pool, recurrent_cache)
        graphs.capture(sizes[-1:])
        with_one = self.tools.free()
        graphs.capture(sizes[-2:-1])
        more = with_one - self.tools.free()
        return GraphCost(first=max(0, before - with_one), more=max(_LEAST_MORE, more))

    def capture(
        self,
        plan: GraphPlan,
        *,
        kv_cache: KVCache,
        req_to_token_pool: ReqToTokenPool,
        recurrent_cache: RecurrentCache | None = None,
    ) -> DecodeGraphs | None:
        """The steps of a plan, over the caches that are to be used: as many of them as can be captured."""
        if not plan.sizes:
            return None
        before, began = self.tools.free(), time.perf_counter()
        graphs = None
        try:
            graphs = self._graphs(plan.sizes[-1], kv_cache, req_to_token_pool, recurrent_cache)
            graphs.capture(plan.sizes)
        except Exception as error:
            _warn(plan.sizes, error)
        if graphs is None or not graphs.sizes:
            return None
        taken, seconds = max(0, before - self.tools.free()), time.perf_counter() - began
        log.info(
            "captured decode steps of %s requests (%d CUDA graphs) in %.1f s; they take %s",
            shown(graphs.sizes),
            len(graphs.sizes),
            seconds,
            show_gib(taken),
        )
        if taken > plan.reserved:
            log.warning(
                "the CUDA graphs take %s, and %s were kept free for them: large steps may run out of memory "
                "(settings: --mem-fraction-static, --cuda-graph-max-bs)",
                show_gib(taken),
                show_gib(plan.reserved),
            )
        return graphs

    def _graphs(
        self, max_batch_size: int, kv_cache: KVCache, pool: ReqToTokenPool, recurrent_cache: RecurrentCache | None
    ) -> DecodeGraphs:
        return DecodeGraphs(
            max_batch_size,
            model=self.model,
            kv_cache=kv_cache,
            req_to_token_pool=pool,
            attn_backend=self.attn_backend,
            capturer=self.tools.new_capturer(),
            recurrent_cache=recurrent_cache,
        )


def _warn(sizes: tuple[int, ...], error: Exception) -> None:
    what = str(error).split("\n")[0] or type(error).__name__
    log.warning("decode steps of %s requests are not all captured as CUDA graphs: %s", shown(sizes), what)
