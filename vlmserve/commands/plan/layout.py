"""A model spread over GPUs, and what each of them holds, from outlines as the engine makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.kv_cache import KVCache, cache_dtype
from vlmserve.memory.recurrent_cache import StateShape
from vlmserve.memory.sizing import quantised_part, weight_bytes
from vlmserve.models.config import ModelConfig
from vlmserve.models.floors import expert_bytes
from vlmserve.models.registry import load_config, make_model, quantization_of
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.fp8 import Fp8Scheme
from vlmserve_common.checkpoint.gptq_awq import Scheme
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.shard import ExpertSharing, PipelineStage, Shard
from vlmserve_common.compute.tensors import dtype_setting


@dataclass(frozen=True, kw_only=True)
class StageShare:
    """The share of a pipeline stage's fullest GPU, the first one: layers `first` .. `last` - 1.

    `embedding`, `dense` (layers without experts), `experts`, `head` (0 if it is the embedding) and `tower` are bytes.
    `kv` is the bytes of a token over `kv_layers` layers, and `state` the state of a request. The `*_numbers` count
    weights that tokens are multiplied by.
    """

    first: int
    last: int
    embedding: int
    dense: int
    experts: int
    head: int
    tower: int
    kv: int
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


def lay_out(folder: Path, args: EngineArgs) -> SpreadModel:
    """Spread the model of a folder, which needs config.json only, as `args` says. Raises what `load_model` raises."""
    hf_config, scheme = read_hf_config(folder), quantization_of(folder)
    # exchanges of experts have no weights
    shard = Shard(
        0, args.tp_size, experts=ExpertSharing(ep_size=args.ep_size, a2a="none"), groups=args.attention_groups
    )
    config = load_config(folder)
    meta, dtype = torch.device("meta"), dtype_setting(args.dtype) or config.dtype
    whole, outline = (make_model(hf_config, one, meta, dtype) for one in (config, load_config(folder, shard)))
    embedding, norm = outline.language_model.embed_tokens, outline.language_model.norm
    assert embedding is not None, "the outline is of all layers"
    assert norm is not None
    head = outline.lm_head or embedding
    held = _part_held(scheme, dtype)
    layers = outline.language_model.layers
    experts = [expert_bytes(layer) // args.tp_size for layer in whole.language_model.layers]
    dense = [weight_bytes(layer) - expert_bytes(layer) for layer in layers]
    numbers = [_numbers(layer) for layer in layers]
    kv_dtype = cache_dtype(args.kv_cache_dtype, dtype)
    per_layer = KVCache.bytes_per_token(1, outline.config.num_kv_heads, outline.config.head_dim, kv_dtype)
    stages = []
    for stage in range(args.pp_size):
        staged = replace(config, shard=Shard(stage=PipelineStage(stage, args.pp_size)))
        staged.of_part()  # which refuses layers that cannot be a stage
        first, last = staged.own_layers.start, staged.own_layers.stop
        begins, ends = first == 0, last == config.num_layers
        kv_layers = last - first
        if config.linear is not None:
            kv_layers -= sum(first <= layer < last for layer in config.linear.layers)
        tied_here = outline.lm_head is None and begins
        stages.append(
            StageShare(
                first=first,
                last=last,
                embedding=weight_bytes(embedding) if begins else 0,
                dense=int(sum(dense[first:last]) * held) + (weight_bytes(norm) if ends else 0),
                experts=int(sum(experts[first:last]) * held),
                head=weight_bytes(head) if ends and not tied_here else 0,
                tower=weight_bytes(outline.visual) if begins else 0,
                kv=kv_layers * per_layer,
                state=_state(outline, last - first - kv_layers),
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
        return quantised_part(scheme.bits, dtype)
    if isinstance(scheme, Fp8Scheme):
        return quantised_part(8, dtype, beside=32 / math.prod(scheme.block) if scheme.block else 0)
    return 1.0


def _numbers(layer: nn.Module) -> int:
    """Return the numbers of a layer's matrices without experts."""
    every = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    itemsize = next(layer.parameters()).dtype.itemsize
    return every - expert_bytes(layer) // itemsize


def _state(outline: VisionLanguageModel, layers: int) -> StateShape | None:
    shape = state_shape(outline.config, outline.dtype)
    if shape is None or not layers:
        return None
    return replace(shape, conv=(layers, *shape.conv[1:]), recurrent=(layers, *shape.recurrent[1:]))


def _active(whole: VisionLanguageModel) -> int:
    config, decoder = whole.config, whole.language_model
    head = whole.lm_head or decoder.embed_tokens
    counted = [part for part in (decoder.layers, decoder.norm, head) if part is not None]
    every = sum(parameter.numel() for part in counted for parameter in part.parameters())
    if config.experts is None:
        return every
    passed_by = 1 - config.experts.chosen / config.experts.count
    return every - round(expert_bytes(decoder.layers) // whole.dtype.itemsize * passed_by)
