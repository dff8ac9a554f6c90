"""Captures decode steps within the memory that there is.

Captured steps hold the addresses of the KV cache, so the cache must exist before. But the cache is sized by the memory
that is left, so the size of the graphs must be known before that. Therefore the largest two steps are captured as a
trial, over a cache of one page. The cache is sized by the result, and the steps are captured for good.

Ranks that share the model's layers capture the same steps in the same order, since each holds its part of the same
exchanges. After each capture they agree whether it succeeded at all of them. Attention groups are captured, and
replayed, as if all had as many requests: see `TokenExchange`.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.cuda_graphs import DecodeGraphs
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend
from vlmserve.models.config import ExpertsConfig
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.expert_exchange import sends_rows
from vlmserve_common.compute.graphs import Capturer, CudaCapturer
from vlmserve_common.compute.lora_tables import AdapterTables
from vlmserve_common.compute.memory import free_memory, show_gib
from vlmserve_common.compute.shard import Shard
from vlmserve_common.parallel.group import CountingCapturer

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks

T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_MOST = 256
"""Requests of the largest step that is captured, unless a setting says otherwise: beyond, computing a step takes longer
than launching it."""
# A driver takes memory in chunks, so that the second graph may seem to take none.
_LEAST_MORE = 8 << 20


@dataclass(frozen=True, kw_only=True)
class GraphTools:
    """The means to capture, on a GPU or in a test. new_capturer: makes a capturer with memory of its own. free: empties
    caches and returns the free bytes. smallest: returns the smallest of all ranks' numbers; all ranks call it at the
    same time."""

    new_capturer: Callable[[], Capturer]
    free: Callable[[], int]
    smallest: Callable[[int], int] = int


@dataclass(frozen=True, kw_only=True)
class GraphCost:
    """Bytes of captured steps. first: of the largest step, with the memory that all steps share. more: of each further
    step."""

    first: int
    more: int

    def of(self, count: int) -> int:
        """Return the bytes of so many steps, the largest step included."""
        return self.first + self.more * (count - 1) if count else 0


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """sizes: requests of the steps to capture. reserved: bytes that these may take."""

    sizes: tuple[int, ...] = ()
    reserved: int = 0


class Pools(NamedTuple):
    """The memory of a model's requests that captured steps work on. recurrent_cache: for models that have such
    layers."""

    kv_cache: KVCache
    req_to_token_pool: ReqToTokenPool
    recurrent_cache: RecurrentCache | None = None


def cuda_tools(device: torch.device) -> GraphTools:
    """Return the tools of a GPU."""

    def free() -> int:
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        return free_memory(device)[0]

    return GraphTools(new_capturer=partial(CudaCapturer, device), free=free)


def tools_of_ranks(tools: GraphTools, ranks: Ranks) -> GraphTools:
    """Extend tools for one of several processes that share a model."""

    def counting() -> Capturer:
        return reduce(CountingCapturer, ranks.computing, tools.new_capturer())

    return replace(tools, new_capturer=counting, smallest=ranks.smallest)


def why_not_captured(args: EngineArgs, experts: ExpertsConfig | None, shard: Shard) -> str | None:
    """Say why decode steps are not captured at any rank, whatever the device; None if nothing prevents it."""
    if args.disable_cuda_graph:
        return "--disable-cuda-graph"
    if shard.stage.size > 1:
        return "stages hand on rows behind each of them (--pp-size)"
    if experts is not None and sends_rows(experts.chosen, shard):
        return "ranks are told in their midst how many rows come to their experts (--moe-a2a-backend)"
    return None


def wanted_sizes(
    args: EngineArgs, attn_backend: AttentionBackend, device: torch.device, experts: ExpertsConfig | None, shard: Shard
) -> tuple[int, ...]:
    """Return the sizes to capture if memory allows it, ascending. None are wanted on a CPU, and where a line in the log
    says why. A given size beyond the limits becomes the largest within them. experts, shard: of the model's part
    here."""
    if device.type != "cuda":
        return ()
    reason = why_not_captured(args, experts, shard)
    if reason is None and not attn_backend.can_capture:
        reason = f"{type(attn_backend).__name__} reads the table on the host (--attention-backend)"
    if reason is not None:
        log.info("decode steps are not captured as CUDA graphs: %s", reason)
        return ()
    if args.cuda_graph_sizes is None:
        return batch_sizes(min(args.max_running_requests, args.cuda_graph_max_bs or DEFAULT_MOST))
    most = min(args.max_running_requests, args.cuda_graph_max_bs or args.max_running_requests)
    return tuple(sorted({min(size, most) for size in args.cuda_graph_sizes}))


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes to capture for up to `most` requests: 1, 2, 4, 8, 16 ... 64, 80 ... 256, 288 ..., and `most`
    itself.

    Products compute tiles of 64 rows or more, so that a few rows of padding cost them nothing.
    """
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32))
    return (*(size for size in usual if size < most), most)


def shown(sizes: tuple[int, ...]) -> str:
    """Format sizes for people: 1, 2, 4 ... 64."""
    return ", ".join(map(str, sizes)) if len(sizes) < 5 else f"{', '.join(map(str, sizes[:3]))} ... {sizes[-1]}"


def plan_graphs(sizes: tuple[int, ...], cost: GraphCost, room: int, smallest: Callable[[int], int] = int) -> GraphPlan:
    """Choose which sizes, ascending, are captured in `room` bytes: the smallest ones. Log a line if not all are.

    The fewer requests a step has, the larger the part of its time that is launching.

    cost: computed with the largest of all sizes. smallest: see `GraphTools`.
    """
    own = max(count for count in range(len(sizes) + 1) if cost.of(count) <= max(0, room))
    chosen = sizes[: smallest(own)]
    if len(chosen) < len(sizes):
        log.warning(
            "capturing decode steps of %s requests takes %s, and there is room for %s%s: %s "
            "(settings: --cuda-graph-bs, --cuda-graph-max-bs, --max-total-tokens)",
            shown(sizes),
            show_gib(cost.of(len(sizes))),
            show_gib(room),
            " here, and for less at another rank" if len(chosen) < own else "",
            f"only those of {shown(chosen)} are captured" if chosen else "none is captured",
        )
    return GraphPlan(sizes=chosen, reserved=cost.of(len(chosen)))


class _NotCapturedError(Exception):
    """Raised at all ranks when one of them cannot capture. Says what went wrong here, or that it was another rank."""


@dataclass(frozen=True, kw_only=True)
class GraphBuilder:
    """Captures a model's decode steps, first for a trial and then for good. adapters: see `DecodeGraphs`."""

    model: VisionLanguageModel
    attn_backend: AttentionBackend
    tools: GraphTools
    adapters: Callable[[int], AdapterTables] | None = None

    def plan(self, sizes: tuple[int, ...], pools: Pools, *, room: int) -> GraphPlan:
        """Choose which of `sizes` (at least one) are captured in `room` bytes. pools: of one page, no requests, and no
        states."""
        try:
            cost = self._trial(sizes, pools)
        except _NotCapturedError as error:  # without graphs it is slower, and that is all
            _warn(sizes, error)
            return GraphPlan()
        finally:
            self.tools.free()  # what the trial took
        return plan_graphs(sizes, cost, room, self.tools.smallest)

    def _trial(self, sizes: tuple[int, ...], pools: Pools) -> GraphCost:
        before = self.tools.free()
        graphs = self._graphs(sizes[-1], pools)
        self._capture(graphs, sizes[-1])
        with_one = self.tools.free()
        for size in sizes[-2:-1]:
            self._capture(graphs, size)
        more = with_one - self.tools.free()
        return GraphCost(first=max(0, before - with_one), more=max(_LEAST_MORE, more))

    def capture(self, plan: GraphPlan, pools: Pools) -> DecodeGraphs | None:
        """Capture the steps of a plan over the real caches, as many as succeed."""
        if not plan.sizes:
            return None
        before, began = self.tools.free(), time.perf_counter()
        graphs = None
        try:
            graphs = self._graphs(plan.sizes[-1], pools)
            for size in reversed(plan.sizes):  # see `Capturer`
                self._capture(graphs, size)
        except _NotCapturedError as error:
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

    def _graphs(self, max_batch_size: int, pools: Pools) -> DecodeGraphs:
        return self._together(
            lambda: DecodeGraphs(
                max_batch_size,
                model=self.model,
                attn_backend=self.attn_backend,
                capturer=self.tools.new_capturer(),
                adapters=self.adapters,
                **pools._asdict(),
            )
        )

    def _capture(self, graphs: DecodeGraphs, size: int) -> None:
        try:
            self._together(lambda: graphs.capture((size,)))
        except _NotCapturedError:
            graphs.drop(size)
            raise

    def _together(self, run: Callable[[], T]) -> T:
        """Return what `run` returns, if it succeeds at all ranks. Otherwise raise _NotCapturedError at all of them."""
        error: Exception | None = None
        try:
            made = run()
        except Exception as caught:  # a compiler's, too
            error = caught
        if self.tools.smallest(int(error is None)):
            return made
        why = "another rank could not"
        if error is not None:
            why = str(error).split("\n")[0] or type(error).__name__
        raise _NotCapturedError(why) from error


def _warn(sizes: tuple[int, ...], error: _NotCapturedError) -> None:
    log.warning("decode steps of %s requests are not all captured as CUDA graphs: %s", shown(sizes), error)
