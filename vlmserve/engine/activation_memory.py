"""Memory for computing, beside weights and caches: estimated from shapes, or measured on a GPU by a pass over zeros.

The largest step that the settings allow counts. It has a prompt chunk, every request that decodes beside it, and a
batch of the vision tower at its limit of patches, or one larger picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from processors.families.config import read_processor_config
from vision.towers.blocks import VisionTower
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.encoder import encoders_beside, resolve_max_patches
from vlmserve.engine.recurrent import state_shape
from vlmserve.executor.model_worker_batch import SamplingBatchInfo
from vlmserve.executor.sampler import sample, sent
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep, Span
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.memory.sizing import Activations, activation_bytes, weight_bytes
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.config import ModelConfig
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve.scheduler.sampling_info import info_of
from vlmserve_common.checkpoint.hf_config import has_tower, read_hf_config
from vlmserve_common.compute.shard import Shard

Meter: TypeAlias = Callable[[Callable[[], object]], int]
"""Runs a function, and returns the peak of the bytes that were allocated meanwhile."""

_LOGITS = 14
"""The float32 copies of logits that exist at a time, if sampling sorts all of them for a top-p. They are logits as
computed, scaled ones, logprobs, a sorted copy with its places (which takes twice as much), and its sums."""


_CUDA_ITSELF = 2**30
"""What CUDA and its libraries take in each process, as `vlmserve plan` assumes."""


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The largest step. tokens: of the decoder. rows: sampled from. patches: of the tower; 0 if the tower is
    elsewhere."""

    tokens: int
    rows: int
    patches: int

    def of_all_groups(self, args: EngineArgs) -> StepLimits:
        """Count all attention groups together: MLPs and sampling compute the tokens of every group."""
        groups = args.attention_groups
        return replace(self, tokens=self.tokens * groups, rows=self.rows * groups)


def step_limits(args: EngineArgs, device: torch.device, *, max_model_len: int, auto_pixels: int | None) -> StepLimits:
    """Return the largest step that the settings allow. auto_pixels: the result of `--max-pixels auto`; None: the
    checkpoint's limit."""
    tokens = max(args.max_prefill_tokens, max_model_len)
    if args.chunked_prefill_size > 0:
        tokens = min(args.max_prefill_tokens, args.chunked_prefill_size)
    patches = 0 if args.num_encoders else _largest_batch(args, device, auto_pixels)
    rows = args.max_running_requests
    return StepLimits(tokens=min(tokens, rows * max_model_len) + rows, rows=rows, patches=patches)


def _largest_batch(args: EngineArgs, device: torch.device, auto_pixels: int | None = None) -> int:
    """Return the patches of the largest batch of a tower: its limit, or one larger picture; 0 without a tower."""
    hf_config = read_hf_config(Path(args.model))
    if not has_tower(hf_config):
        return 0
    config = read_processor_config(Path(args.model), hf_config)
    limits = [config.max_pixels, auto_pixels, args.max_pixels if isinstance(args.max_pixels, int) else None]
    pixels = min(limit for limit in limits if limit is not None)
    return max(resolve_max_patches(args, device), pixels // config.patches.patch_size**2)


def encoder_bytes(
    args: EngineArgs, device: torch.device, towers: Sequence[VisionTower], dtype: torch.dtype, shard: Shard
) -> int:
    """Return the bytes that encoder processes will take on a rank's GPU: of each, towers, the largest batch, and CUDA
    itself. They start when the KV cache is there. towers: may be on the meta device. device, shard: the rank's."""
    count = encoders_beside(args, device, shard)
    if not count:
        return 0
    batch = _largest_batch(args, device)
    computing = max(_tower_bytes(tower, batch, dtype.itemsize) for tower in towers)
    return count * (sum(map(weight_bytes, towers)) + computing + _CUDA_ITSELF)


def estimate_activations(model: VisionLanguageModel, limits: StepLimits) -> Activations:
    """Estimate from the shapes of a model, which may be on the meta device."""
    config, itemsize = model.config, model.dtype.itemsize
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # heads before and after they are turned, and attention's output; or gate and up, their product, and its input
    widest = max(
        2 * (heads + 2 * kv_heads) + heads,
        4 * config.intermediate_size,
        _experts_width(config),
        _linear_width(config),
        _streams_width(config),
    )
    beside = (model.visual.row_width + len(model.language_model.tapped) * config.stream_size) * itemsize
    if config.index is not None:  # the chosen slots, as they are found and as they are attended to
        beside += 3 * config.index.most * torch.int64.itemsize
    logits = limits.rows * config.vocab_size * torch.float32.itemsize * _LOGITS
    return Activations(
        tower=_tower_bytes(model.visual, limits.patches, itemsize) if limits.patches else 0,
        step=activation_bytes(
            limits.tokens, stream=config.stream_size, widest=widest, itemsize=itemsize, beside=beside
        ),
        logits=logits if model.comm.shard.stage.is_last else guess_logits(model, limits.rows),
    )


def guess_logits(model: VisionLanguageModel, rows: int) -> int:
    """Return the bytes of logits of a smaller model that guesses for so many requests; 0 without one. They exist twice:
    as computed, and of the tokens that the model has, too."""
    return 0 if model.draft is None else 2 * rows * model.draft.config.vocab_size * torch.float32.itemsize


def measure_activations(
    model: VisionLanguageModel,
    attn_backend: AttentionBackend,
    limits: StepLimits,
    meter: Meter,
    cache_dtype: torch.dtype | None = None,
) -> Activations:
    """Measure a loaded model by computing such steps over zeros. cache_dtype: the KV cache's; by default the
    model's."""
    with torch.inference_mode():
        device = next(model.language_model.parameters()).device
        batch = _dummy_batch(model, cache_dtype or model.dtype, attn_backend, limits.tokens, device)
        hidden = torch.zeros((limits.rows, model.config.hidden_size), dtype=model.dtype, device=device)
        info, shard = dummy_sampling(limits.rows), model.comm.shard

        def logits() -> None:
            whole_or_part = model.compute_logits(hidden)
            if shard.samples:
                sample(whole_or_part, info, sent(info, whole_or_part))

        return Activations(
            tower=meter(lambda: encode_nothing(model.visual, limits.patches, device)) if limits.patches else 0,
            step=meter(lambda: _decode(model, batch)),
            logits=meter(logits) if shard.stage.is_last else guess_logits(model, limits.rows),
            beside=True,  # each on a stream of its own
        )


def cuda_meter(device: torch.device) -> Meter:
    """Return a meter of a GPU's memory. The GPU gets cached blocks back."""

    def measure(run: Callable[[], object]) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak

    return measure


def _tower_bytes(tower: VisionTower, patches: int, itemsize: int) -> int:
    pixels = next(weight for name, weight in tower.named_parameters() if name.startswith("patch_embed."))
    first = [weight for name, weight in tower.named_parameters() if name.startswith("blocks.0.") and weight.ndim == 2]
    stream = len(pixels)
    # heads in one piece, turned, and their results; or what an MLP has inside
    widest = max(2 * 3 * stream + stream, 3 * max(weight.shape[0] for weight in first))
    merged = tower.row_width * itemsize // tower.spatial_merge_size**2
    values = pixels[0].numel() * (2 * torch.float32.itemsize + itemsize)
    return activation_bytes(patches, stream=stream, widest=widest, itemsize=itemsize, beside=values + 2 * merged)


def _linear_width(config: ModelConfig) -> int:
    """Return the elements of a gated delta net per token: its product and its output. The delta rule's own float32
    values belong to a few hundred tokens only."""
    linear = config.linear
    return 0 if linear is None else linear.conv_size + 4 * linear.value_size


def _streams_width(config: ModelConfig) -> int:
    """Return the elements of what mixes residual streams per token: gates, twice, and gated streams; 0 with one
    stream."""
    return 0 if config.streams is None else 3 * config.stream_size


def _experts_width(config: ModelConfig) -> int:
    """Return the elements of a sparse MLP per token: its odds in float32, twice, and for each chosen expert the input,
    gate and up with their product, and the output."""
    experts = config.experts
    if experts is None:
        return 0
    return 4 * experts.count + experts.chosen * (2 * config.hidden_size + 3 * experts.intermediate_size)


def encode_nothing(tower: VisionTower, patches: int, device: torch.device) -> torch.Tensor:
    """Encode one square picture of about so many patches."""
    merge = tower.spatial_merge_size
    side = max(merge, int(patches**0.5) // merge * merge)
    values = torch.zeros((side * side, math.prod(tower.patch_embed.proj.kernel)), dtype=torch.float32, device=device)
    return tower(values, [(1, side, side)])


def _decode(model: VisionLanguageModel, batch: ForwardBatch) -> torch.Tensor:
    if model.comm.shard.stage.is_first:
        embeds = model.embed_tokens(batch.input_ids)
    else:
        shape = len(batch.input_ids), model.config.stream_size
        embeds = torch.zeros(shape, dtype=model.dtype, device=batch.input_ids.device)
    layers = model.visual.num_deepstack_layers
    every = torch.arange(len(embeds), device=embeds.device)
    deepstack = embeds.new_zeros((layers, *embeds.shape)) if layers else None
    batch.attn_backend.init_forward_metadata(batch)
    return model.forward(
        embeds, batch.positions, batch, deepstack_index=every if layers else None, deepstack_embeds=deepstack
    )


def _dummy_batch(
    model: VisionLanguageModel, dtype: torch.dtype, attn_backend: AttentionBackend, tokens: int, device: torch.device
) -> ForwardBatch:
    config = model.config
    slots = torch.arange(tokens, device=device)
    pool = ReqToTokenPool(1, tokens, device)
    pool.write(0, 0, slots)
    cache = KVCache(
        num_slots=tokens,
        num_layers=config.num_kv_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        further=model.further_kv,
    )
    shape = state_shape(config, model.dtype)
    span = Span(start=0, length=tokens, prefix_len=0, state=1)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=slots.expand(3, -1).contiguous(),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        extend_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        prefix_lens=[0],
        extend_lens=[tokens],
        out_cache_loc=slots,
        req_to_token_pool=pool,
        kv_cache=cache,
        attn_backend=attn_backend,
        recurrent=None if shape is None else RecurrentStep(cache=RecurrentCache(1, shape, device), spans=(span,)),
    )


def dummy_sampling(rows: int) -> SamplingBatchInfo:
    """Make the costliest sampling: every request samples among its likeliest tokens, for which all are sorted."""
    return replace(
        info_of([]),
        batch_indices=np.arange(rows),
        token_indices=np.arange(rows),
        temperatures=np.ones(rows, dtype=np.float32),
        top_ps=np.full(rows, 0.9, dtype=np.float32),
        top_ks=np.zeros(rows, dtype=np.int64),
        min_ps=np.zeros(rows, dtype=np.float32),
        seeds=np.arange(rows),
        output_indices=np.zeros(rows, dtype=np.int64),
        num_logprobs=np.full(rows, -1, dtype=np.int64),
    )
