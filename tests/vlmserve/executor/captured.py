"""Engines whose decode steps are graphs, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tests.fake_graphs import CallsAgain, Recorder
from tests.vlmserve.executor.paged_backend import PagedBackend
from vlmserve import LLM
from vlmserve.engine.recurrent import state_shape
from vlmserve.executor.cuda_graphs import DecodeGraphs
from vlmserve.memory.recurrent_cache import RecurrentCache

CPU = torch.device("cpu")


def capture_steps(
    llm: LLM, sizes: Sequence[int], capturer: CallsAgain | Recorder, *, most_adapters: int | None = None
) -> None:
    """Let an engine compute decode steps of these sizes by graphs. most_adapters: of a step; None for no adapters."""
    runner = llm._runner
    runner.attn_backend = PagedBackend()
    shape = state_shape(runner.model.config, runner.model.dtype)
    if shape is not None:
        runner.recurrent_cache = RecurrentCache(runner.recurrent_cache.num_states, shape, CPU, padded=True)
    adapters = None
    if most_adapters is not None:
        adapters = partial(runner.adapters.tables, most=most_adapters, device=CPU)
    graphs = DecodeGraphs(
        max(sizes),
        model=runner.model,
        kv_cache=runner.kv_cache,
        req_to_token_pool=runner.req_to_token_pool,
        attn_backend=runner.attn_backend,
        capturer=capturer,
        recurrent_cache=runner.recurrent_cache,
        adapters=adapters,
    )
    graphs.capture(sizes)
    runner.attach_graphs(graphs)
