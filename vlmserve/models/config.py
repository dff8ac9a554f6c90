"""A checkpoint's configuration, as the engine and the decoders need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.hf_config import declared_dtype, text_fields
from vlmserve_common.compute.shard import WHOLE, Shard
from vlmserve_common.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ModelDefaults:
    """What a family's config.json may leave out."""

    rope_theta: float
    mrope_section: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """family: model_type. mrope_section: how many of head_dim / 2 frequencies turn with time, height and width.

    eos_token_ids: of generation_config.json and config.json together. dtype: what the checkpoint declares. shard: the
    part of the model that this process has; sizes are of the whole, but for those of `of_part`.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope_theta: float
    mrope_section: tuple[int, int, int]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard = WHOLE

    def of_part(self) -> ModelConfig:
        """With the heads and inner elements that this process has. EngineError if they cannot be shared."""
        return replace(
            self,
            num_heads=self.shard.part(self.num_heads, "num_attention_heads"),
            num_kv_heads=self.shard.kv_heads(self.num_kv_heads),
            intermediate_size=self.shard.part(self.intermediate_size, "intermediate_size"),
        )


def read_model_config(
    hf_config: Mapping[str, Any], generation_config: Mapping[str, Any], defaults: ModelDefaults
) -> ModelConfig:
    """From config.json, with the text fields at the top or in `text_config`, and generation_config.json ({} if none).

    Raises CheckpointError for missing or impossible values, and for what is not supported: sliding windows,
    scaled rotary positions.
    """
    top = Fields(hf_config, "config.json")
    text = text_fields(top)
    if text.flag("use_sliding_window", False):
        raise CheckpointError("config.json: use_sliding_window is true; sliding-window attention is not supported")
    hidden_size, num_heads = text.positive("hidden_size"), text.positive("num_attention_heads")
    head_dim = text.positive("head_dim", hidden_size // num_heads)
    num_kv_heads = text.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    rope_theta, mrope_section = _rope(text, defaults, head_dim)
    return ModelConfig(
        family=top.string("model_type"),
        num_layers=text.positive("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=text.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=text.positive("vocab_size"),
        max_position_embeddings=text.positive("max_position_embeddings"),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        hidden_act=text.string("hidden_act", "silu"),
        attention_bias=text.flag("attention_bias", False),
        rope_theta=rope_theta,
        mrope_section=mrope_section,
        # some checkpoints say it in one of the two places only
        tie_word_embeddings=top.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(generation_config, text.values, hf_config),
        dtype=declared_dtype(hf_config),
    )


def _rope(text: Fields, defaults: ModelDefaults, head_dim: int) -> tuple[float, tuple[int, int, int]]:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    name = "rope_parameters" if text.has("rope_parameters") else "rope_scaling"
    rope = text.section(name)
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"{rope.where}: type {kind!r} is not supported, only 'default' and 'mrope'")
    theta = rope.number("rope_theta", text.number("rope_theta", defaults.rope_theta))
    section = rope.integers("mrope_section", defaults.mrope_section)
    if len(section) != 3 or sum(section) != head_dim // 2 or head_dim % 2:
        raise CheckpointError(
            f"{rope.where}: mrope_section is {list(section)}, and must be 3 numbers with the sum of half a head "
            f"({head_dim}/2)"
        )
    return theta, section


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise CheckpointError(f"eos_token_id is {value!r}, and must be a token id or a list of them")
        found.update(dict.fromkeys(ids))
    return tuple(found)
