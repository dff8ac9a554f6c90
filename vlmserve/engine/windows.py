"""Layers with sliding windows: how many tokens they keep in a pool of their own, and who manages it."""

from __future__ import annotations

import torch

from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.memory.kv_cache import KVShape
from vlmserve.memory.sizing import WindowRoom
from vlmserve.memory.window_pool import WindowPool
from vlmserve.models.config import ModelConfig
from vlmserve.models.vlm import VisionLanguageModel


def keeps_all(args: EngineArgs) -> str | None:
    """Return the setting that moves KV of all layers together, so that layers with windows keep all tokens; None if
    there is none."""
    if args.enable_hierarchical_cache and not args.disable_radix_cache:
        return "--enable-hierarchical-cache"
    return f"--role {args.role}" if args.role in ("prefill", "decode") else None


def window_tokens(args: EngineArgs, config: ModelConfig, max_model_len: int) -> int:
    """Return the tokens that layers with windows keep of all requests together; 0 if they keep all. config: of the
    whole model.

    These are for each request the window, tokens of steps in flight with guesses, and what whole pages take besides;
    and the prompt tokens of steps in flight.
    """
    if not config.windowed or config.window >= max_model_len or keeps_all(args):
        return 0
    page, steps = args.page_size, 1 if args.disable_overlap_schedule else args.pp_size + 1
    each = config.window + steps + args.most_drafts + 2 * page
    chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else max(args.max_prefill_tokens, max_model_len)
    return -(-(args.max_running_requests * each + steps * chunk) // page) * page


def window_room(
    args: EngineArgs, model: VisionLanguageModel, max_model_len: int, kv_dtype: torch.dtype
) -> WindowRoom | None:
    """Return the room for layers with windows in a process's part of a model; None if they keep all tokens."""
    tokens, own = window_tokens(args, model.whole_config, max_model_len), model.config
    if not tokens:
        return None
    return WindowRoom(tokens, len(own.windowed) * KVShape(own.num_kv_heads, own.head_dim).nbytes(kv_dtype))


def window_pool(args: EngineArgs, runner: ModelRunner, num_slots: int) -> WindowPool | None:
    """Make the manager of a runner's slots of layers with windows; None if these keep all tokens. num_slots: of its
    other layers, dummy page included."""
    size = runner.kv_cache.window_slots - args.page_size
    if size <= 0:
        return None
    return WindowPool(size, window=runner.model.config.window, num_slots=num_slots, page_size=args.page_size)
