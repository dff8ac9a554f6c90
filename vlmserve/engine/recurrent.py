"""Recurrent states of hybrid models: how many fit, and who manages them."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.memory.recurrent_cache import GuessCache, RecurrentCache, StateShape
from vlmserve.memory.recurrent_states import RecurrentStates
from vlmserve.models.config import ModelConfig
from vlmserve.scheduler.request_states import RequestStates, snapshot_unit
from vlmserve_common.errors import EngineError

log = logging.getLogger(__name__)


def state_shape(config: ModelConfig, dtype: torch.dtype) -> StateShape | None:
    """Return the shape of a request's state in a model that computes in `dtype`; None without recurrent layers."""
    linear = config.linear
    if linear is None or not linear.layers:
        return None
    layers, ngrams = len(linear.layers), config.ngrams
    if ngrams is not None and not ngrams.layers:  # they are all in other stages
        ngrams = None
    return StateShape(
        conv=(layers, linear.conv_width - 1, linear.conv_size),
        recurrent=(layers, linear.num_value_heads, linear.key_dim, linear.value_dim),
        conv_dtype=dtype,
        hidden=config.stream_size if config.mtp_layers else 0,
        ngram_conv=(0, 0, 0) if ngrams is None else (len(ngrams.layers), ngrams.conv_inputs, config.stream_size),
        ngram_ids=0 if ngrams is None else ngrams.size - 1,
    )


def recurrent_cache(
    args: EngineArgs, shape: StateShape | None, num_states: int, device: torch.device, *, padded: bool
) -> RecurrentCache | None:
    """Allocate so many states, and with any what steps with guesses need; None without recurrent layers. padded: see
    `RecurrentCache`."""
    if shape is None:
        return None
    cache = RecurrentCache(num_states, shape, device, padded=padded)
    if num_states and (tokens := guessed_tokens(args)):
        cache.guesses = GuessCache(args.max_running_requests, tokens, shape, device)
    return cache


def num_states(args: EngineArgs, shape: StateShape, max_model_len: int) -> int:
    """Return the number of states: one for each request that may run, and snapshots for which --mamba-cache-mib has
    room. There are never more snapshots than places for them in so many requests."""
    snapshots = 0
    if _keeps_snapshots(args):
        places = args.max_running_requests * (max_model_len // snapshot_unit(args.page_size) + 1)
        snapshots = max(1, min(args.mamba_cache_mib * 2**20 // shape.nbytes, places))
    return args.max_running_requests + snapshots


def state_bytes(
    args: EngineArgs, config: ModelConfig, dtype: torch.dtype, max_model_len: int, *, padded: bool = False
) -> int:
    """Return `bytes_of_states` of a model; 0 without recurrent layers."""
    shape = state_shape(config, dtype)
    return 0 if shape is None else bytes_of_states(args, shape, max_model_len, padded=padded)


def bytes_of_states(args: EngineArgs, shape: StateShape, max_model_len: int, *, padded: bool = False) -> int:
    """Return the bytes of all states, the blank one included, and of what steps with guesses keep. padded: see
    `RecurrentCache`."""
    guesses = args.max_running_requests * shape.guess_bytes(guessed_tokens(args))
    return (1 + num_states(args, shape, max_model_len) + padded) * shape.nbytes + guesses


def request_states(args: EngineArgs, runner: ModelRunner, num_slots: int) -> RequestStates | None:
    """Make the manager of a runner's states; None without recurrent layers. num_slots: of its KV cache, dummy page
    included."""
    cache = runner.recurrent_cache
    if cache is None:
        return None
    return RequestStates(
        RecurrentStates(cache.num_states, num_slots=num_slots, page_size=args.page_size),
        unit=snapshot_unit(args.page_size),
        interval=args.mamba_track_interval,
        snapshots=_keeps_snapshots(args),
    )


def supported_args(args: EngineArgs, config: ModelConfig) -> EngineArgs:
    """Return the settings without those that recurrent layers do not support, and log a line for each. Answers are the
    same."""
    if config.linear is None:
        return args
    if args.enable_hierarchical_cache:
        log.warning("--enable-hierarchical-cache is off: states of %s stay on the device", config.family)
        args = replace(args, enable_hierarchical_cache=False, hicache_storage_dir=None)
    return args


def check_supported(args: EngineArgs, config: ModelConfig) -> None:
    """EngineError for settings that sparse attention and several residual streams do not support."""
    if config.index is not None and args.kv_cache_dtype != "auto":
        raise EngineError(
            f"--kv-cache-dtype is {args.kv_cache_dtype}: the KV cache of {config.family} has the index of its sparse "
            "attention, which 8 bits would change; leave it at auto"
        )
    if config.streams is not None and args.speculative_algorithm == "eagle3":
        raise EngineError(
            f"--speculative-algorithm is eagle3: EAGLE-3 heads read the input of single layers, and those of "
            f"{config.family} have {config.streams.count} residual streams; ngram and draft_model work"
        )


def guessed_tokens(args: EngineArgs) -> int:
    """Return the tokens of a request with guesses in a step, at most, that states can go back behind; 0 without
    guesses. Those of grammars alone are not worth the memory."""
    return 0 if args.speculative_algorithm == "none" else 1 + args.most_drafts


def _keeps_snapshots(args: EngineArgs) -> bool:
    return bool(args.mamba_cache_mib) and not args.disable_radix_cache
