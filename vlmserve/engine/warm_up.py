"""Computes a few small steps before the first request. They build and load kernels and page-locked memory, and a GPU
that fails at any of them fails at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from vlmserve.engine.activation_memory import dummy_sampling, encode_nothing
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, SamplingBatchInfo
from vlmserve.models.attention.base import ForwardMode

log = logging.getLogger(__name__)

# Requests of a step, tokens of the prompt of each; and patches of a picture.
_REQUESTS, _PROMPT, _PATCHES = 2, 20, 16


def warm_up(runner: ModelRunner, *, with_tower: bool) -> None:
    """Compute prompts, prompts beside decoding, and decoding, sampled in every way, in slots and states that no request
    holds yet. Nothing reads the tables, KV and states that this leaves behind. with_tower: whether the tower is on the
    device.

    Raises as `executor.launched_step.device_errors` does.
    """
    began = time.perf_counter()
    if with_tower:
        with torch.inference_mode():
            encode_nothing(runner.model.visual, _PATCHES, runner.device)
    for batch in _steps(runner):
        forwarded, shard = runner.forward(batch), runner.model.comm.shard
        if not shard.stage.is_last:
            continue
        for info in _ways(len(batch.req_pool_indices), batch, vocab=runner.model.config.vocab_size):
            if shard.samples:
                runner.sample(forwarded, info).result()
            else:  # which has part of the logits
                runner.take_part_in_sampling(forwarded, info.token_indices)
    log.info("warmed up in %.1f s", time.perf_counter() - began)


def _steps(runner: ModelRunner) -> Iterator[ModelWorkerBatch]:
    """Yield steps as large as the pools allow; these have room for at least two tokens a request."""
    pool, slots = runner.req_to_token_pool, min(len(layer.keys) for layer in runner.kv_cache.layers)
    requests = min(_REQUESTS, pool.size)
    longest = min(pool.max_context_len, slots // requests)
    prompt = min(_PROMPT, longest - 2)
    if prompt < 2:
        return
    steps: list[tuple[ForwardMode, list[tuple[int, int]]]] = [(ForwardMode.EXTEND, [(0, prompt)] * requests)]
    if requests > 1:
        steps.append((ForwardMode.MIXED, [(0, prompt), (prompt, 1)]))
    steps += [(ForwardMode.DECODE, [(prompt, 1)] * count) for count in range(1, requests + 1)]
    for mode, lengths in steps:
        batch = _batch(mode, lengths, longest)
        yield batch if runner.recurrent_cache is None else replace(batch, states=1 + batch.req_pool_indices)


def _batch(mode: ForwardMode, requests: Sequence[tuple[int, int]], longest: int) -> ModelWorkerBatch:
    """Make a step. requests: tokens before the step and in it, for each request, which has `longest` slots to
    itself."""
    prefixes, new = (np.array(part, dtype=np.int64) for part in zip(*requests, strict=True))
    places = np.concatenate([np.arange(past, past + count) for past, count in requests])
    rows = np.arange(len(requests))
    return ModelWorkerBatch(
        step=0,
        forward_mode=int(mode),
        req_pool_indices=rows,
        input_ids=np.zeros(len(places), dtype=np.int64),
        positions=np.repeat(places[None], 3, axis=0),
        positions_before=np.repeat(np.maximum(prefixes - 1, 0)[None], 3, axis=0),
        seq_lens=prefixes + new,
        prefix_lens=prefixes,
        out_cache_loc=np.repeat(rows * longest, new) + places,
        prefix_slots=(),
        mm_embeds=(),
    )


def _ways(rows: int, batch: ModelWorkerBatch, *, vocab: int) -> Iterator[SamplingBatchInfo]:
    """Yield ways to sample: greedily, among all tokens, the likeliest, and those of a least probability; with penalties
    and logprobs."""
    last = (batch.seq_lens - batch.prefix_lens).cumsum() - 1
    random = replace(dummy_sampling(rows), token_indices=last)
    greedy = replace(random, temperatures=np.zeros(rows, dtype=np.float32))
    ones, numbers = np.ones(rows, dtype=np.float32), np.arange(rows)
    yield greedy
    yield replace(random, top_ps=ones)
    yield random
    yield replace(random, top_ks=np.full(rows, min(50, vocab), dtype=np.int64), min_ps=ones / vocab)
    yield replace(
        greedy,
        count_rows=numbers,
        count_ids=numbers % vocab,
        count_values=np.ones(rows, dtype=np.int64),
        presence=ones,
        frequency=ones,
        seen_rows=numbers,
        seen_ids=numbers % vocab,
        repetition=ones * 2,
        num_logprobs=np.ones(rows, dtype=np.int64),
    )
