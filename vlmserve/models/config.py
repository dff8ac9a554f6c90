"""A checkpoint's configuration, as the engine and the decoders need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlmserve.models.qwen4_exp.config import (
    IndexConfig,
    NGramConfig,
    StreamsConfig,
    read_index,
    read_ngrams,
    read_streams,
)
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.hf_config import declared_dtype, text_fields
from vlmserve_common.checkpoint.rope import Rope, context_length, read_rope, rope_fields
from vlmserve_common.compute.expert_part import part_of_experts
from vlmserve_common.compute.shard import WHOLE, Shard
from vlmserve_common.errors import CheckpointError, EngineError


@dataclass(frozen=True, kw_only=True)
class ModelDefaults:
    """Values that a family's config.json may leave out. mrope_section: None if all turns with time. has_experts:
    whether its MLPs are sparse. has_linear_attention: whether most of its layers are gated delta nets.
    partial_rotary_factor: how much of a head turns. norm_topk_prob: whether the scores of a token's experts add up to
    1. has_windows: whether some of its layers may see the last tokens only. has_streams: whether it has several
    residual streams, sparse attention, and tables of n-grams."""

    rope_theta: float
    mrope_section: tuple[int, int, int] | None = None
    has_experts: bool = False
    has_linear_attention: bool = False
    partial_rotary_factor: float = 1.0
    norm_topk_prob: bool = True
    has_windows: bool = False
    has_streams: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Sparse MLPs. A token goes through `chosen` of `count` experts, each of intermediate_size.

    sparse_layers: the layers with such MLPs; other layers are dense. shared_size: intermediate size of the expert that
    all tokens go through in addition; 0 if there is none.
    """

    count: int
    chosen: int
    intermediate_size: int
    sparse_layers: frozenset[int]
    shared_size: int = 0

    def of_part(self, shard: Shard) -> ExpertsConfig:
        """Return the configuration of a process's part: the inner elements that it has of its experts. EngineError if
        they cannot be shared."""
        part = part_of_experts(self.count, self.intermediate_size, shard)
        shared = shard.part(self.shared_size, "shared_expert_intermediate_size")
        return replace(self, intermediate_size=part.size, shared_size=shared)


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Gated delta nets (arXiv:2412.06464) in place of attention, in the layers `layers`. Each head of queries and keys
    serves several heads of values. conv_width: tokens that the convolution before sees. gate_act: of the gates behind
    the norm."""

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate_act: str = "silu"

    @property
    def key_size(self) -> int:
        """The size of all key heads together; queries have the same."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """The size of all value heads together."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def of_part(self, shard: Shard) -> LinearAttentionConfig:
        """Return the configuration of a process's part: the heads that it has. EngineError if they cannot be shared."""
        return replace(
            self,
            num_key_heads=shard.part(self.num_key_heads, "linear_num_key_heads"),
            num_value_heads=shard.part(self.num_value_heads, "linear_num_value_heads"),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes. family: model_type. context_length: tokens that it is made for. mrope_section: how many of
    rotary_dim / 2 frequencies turn with time, height and width. linear: None if all layers are attention. mtp_layers:
    of the head that guesses further tokens; 0 if it is not used. embeds_last: whether the last stage of a pipeline
    embeds tokens, too, for a head that guesses. windowed: the layers whose tokens see the last `window` tokens only.
    streams: None with one residual stream. index: of sparse attention. ngrams: None without n-gram tables.

    eos_token_ids: of generation_config.json and config.json together. dtype: declared by the checkpoint. shard: the
    part of the model that this process has. Sizes and numbers of layers describe the whole model, except in the result
    of `of_part`.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope: Rope
    mrope_section: tuple[int, int, int]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    experts: ExpertsConfig | None = None
    linear: LinearAttentionConfig | None = None
    window: int = 0
    windowed: frozenset[int] = frozenset()
    streams: StreamsConfig | None = None
    index: IndexConfig | None = None
    ngrams: NGramConfig | None = None
    mtp_layers: int = 0
    embeds_last: bool = False
    shard: Shard = WHOLE

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that turn, the first ones."""
        return 2 * sum(self.mrope_section)

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values. Those of the head that guesses come last."""
        return self.num_layers - (len(self.linear.layers) if self.linear is not None else 0) + self.mtp_layers

    @property
    def num_index_layers(self) -> int:
        """Layers of the KV cache, behind those with keys and values, for the keys of sparse attention's index."""
        return 0 if self.index is None else self.num_kv_layers

    @property
    def stream_size(self) -> int:
        """Elements of all residual streams of a token, which layers hand on to each other."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    @property
    def own_layers(self) -> range:
        """The layers that this process has, or has a part of. EngineError for more stages than layers."""
        return self.shard.stage.layers(self.num_layers, self._head_in_layers())

    def _head_in_layers(self) -> float:
        """Return the head's cost in layers: half of its weights, because decoding uses all of them and a prompt next to
        none. It is 0 in a hybrid model, whose stages must have layers of both kinds."""
        if self.linear is not None:
            return 0.0
        inner, experts = self.intermediate_size, self.experts
        if experts is not None and experts.sparse_layers:
            inner = experts.chosen * experts.intermediate_size + experts.shared_size
        of_layer = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim + 3 * inner  # times hidden_size
        return self.vocab_size / of_layer / 2

    def of_part(self) -> ModelConfig:
        """Return the configuration of this process's part: its layers, heads and inner elements. EngineError if they
        cannot be shared."""
        own, linear, stages = self.own_layers, self.linear, self.shard.stage.size
        if linear is not None:
            linear = replace(linear, layers=frozenset(i - own.start for i in linear.layers if i in own))
            if stages > 1 and not 0 < len(linear.layers) < len(own):
                raise EngineError(
                    f"--pp-size is {stages}: layers {own.start} .. {own.stop - 1} are all of one kind, and each stage "
                    "of a hybrid model must have both"
                )
        return replace(
            self,
            num_layers=len(own),
            mtp_layers=self.mtp_layers if self.shard.stage.is_last else 0,
            linear=None if linear is None else linear.of_part(self.shard.attention),
            windowed=frozenset(i - own.start for i in self.windowed if i in own),
            ngrams=None if self.ngrams is None else self.ngrams.of_layers(own),
            num_heads=self.shard.attention.part(self.num_heads, "num_attention_heads"),
            num_kv_heads=self.shard.attention.kv_heads(self.num_kv_heads),
            intermediate_size=self.shard.part(self.intermediate_size, "intermediate_size"),
            experts=None if self.experts is None else self.experts.of_part(self.shard),
        )


def read_model_config(
    hf_config: Mapping[str, Any], generation_config: Mapping[str, Any], defaults: ModelDefaults
) -> ModelConfig:
    """Read config.json, with the text fields at the top or in `text_config`, and generation_config.json ({} if none).

    Raises CheckpointError for missing or impossible values, and for unsupported ones: some ways to scale rotary
    positions, windows where transformers has none.
    """
    top = Fields(hf_config, "config.json")
    text = text_fields(top)
    hidden_size, num_heads = text.positive("hidden_size"), text.positive("num_attention_heads")
    head_dim = text.positive("head_dim", hidden_size // num_heads)
    num_kv_heads = text.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    num_layers = text.positive("num_hidden_layers")
    window, windowed = _windows(text, num_layers, defaults)
    experts = _experts(text, num_layers, defaults) if defaults.has_experts else None
    linear = _linear_attention(text, num_layers, defaults) if defaults.has_linear_attention else None
    mrope_section = _mrope_section(text, defaults, head_dim)
    return ModelConfig(
        family=top.string("model_type"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        # where all MLPs are sparse it may be missing
        intermediate_size=text.positive("intermediate_size", experts.intermediate_size if experts else None),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=text.positive("vocab_size"),
        context_length=context_length(text),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        hidden_act=text.string("hidden_act", "silu"),
        attention_bias=text.flag("attention_bias", False),
        rope=read_rope(text, defaults.rope_theta),
        mrope_section=mrope_section,
        # some checkpoints say it in one of the two places only
        tie_word_embeddings=top.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(generation_config, text.values, hf_config),
        dtype=declared_dtype(hf_config),
        experts=experts,
        window=window,
        windowed=windowed,
        linear=linear,
        streams=read_streams(text) if defaults.has_streams else None,
        index=read_index(text, 2 * sum(mrope_section)) if defaults.has_streams else None,
        ngrams=read_ngrams(text, linear.layers) if defaults.has_streams and linear is not None else None,
    )


def _windows(text: Fields, num_layers: int, defaults: ModelDefaults) -> tuple[int, frozenset[int]]:
    """Read the length of sliding windows, and which layers have them: they are listed, or those behind the first
    `max_window_layers`."""
    if not text.flag("use_sliding_window", False) or text.values.get("sliding_window", 0) is None:
        return 0, frozenset()
    if not defaults.has_windows:
        raise CheckpointError(f"{text.where}: use_sliding_window is true, which this family does not have")
    window = text.positive("sliding_window", 4096)
    types = text.values.get("layer_types")
    if types is None:
        return window, frozenset(range(text.integer("max_window_layers"), num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(_WINDOW_TYPES):
        raise CheckpointError(
            f"{text.where}: layer_types is {types!r}, and must be {num_layers} of {' and '.join(_WINDOW_TYPES)}"
        )
    return window, frozenset(i for i, kind in enumerate(types) if kind == "sliding_attention")


_WINDOW_TYPES = ("sliding_attention", "full_attention")


def _experts(text: Fields, num_layers: int, defaults: ModelDefaults) -> ExpertsConfig | None:
    """Read the experts; None if all MLPs are dense."""
    name = (
        "num_local_experts" if text.has("num_local_experts") else "num_experts"
    )  # the first in files of transformers 5
    if text.integer(name) == 0:
        return None
    count, chosen = text.positive(name), text.positive("num_experts_per_tok")
    if chosen > count:
        raise CheckpointError(f"{text.where}: num_experts_per_tok is {chosen}, and there are {count} experts")
    if not text.flag("norm_topk_prob", defaults.norm_topk_prob):
        absent = "" if text.has("norm_topk_prob") else " by default"
        raise CheckpointError(
            f"{text.where}: norm_topk_prob is false{absent}; the scores of a token's experts always add up to 1 here"
        )
    step, dense = text.positive("decoder_sparse_step", 1), text.integers("mlp_only_layers", ())
    return ExpertsConfig(
        count=count,
        chosen=chosen,
        intermediate_size=text.positive("moe_intermediate_size"),
        sparse_layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        shared_size=text.integer("shared_expert_intermediate_size", 0),
    )


_LAYER_TYPES = ("linear_attention", "full_attention")


def _linear_attention(text: Fields, num_layers: int, defaults: ModelDefaults) -> LinearAttentionConfig:
    """Read which layers are delta nets: they are listed, or every nth layer is attention
    (`full_attention_interval`)."""
    interval = text.positive("full_attention_interval", 4)
    types = text.values.get("layer_types") or [_LAYER_TYPES[(i + 1) % interval == 0] for i in range(num_layers)]
    if defaults.has_streams and isinstance(types, list):  # which transformers calls so when it saves them
        types = ["full_attention" if one == "indexed_attention" else one for one in types]
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(_LAYER_TYPES):
        raise CheckpointError(
            f"{text.where}: layer_types is {types!r}, and must be {num_layers} of {' and '.join(_LAYER_TYPES)}"
        )
    if "full_attention" not in types:
        raise CheckpointError(f"{text.where}: none of layer_types is full_attention, and one has to be")
    found = LinearAttentionConfig(
        layers=frozenset(i for i, kind in enumerate(types) if kind == "linear_attention"),
        num_key_heads=text.positive("linear_num_key_heads", 16),
        num_value_heads=text.positive("linear_num_value_heads", 32),
        key_dim=text.positive("linear_key_head_dim", 128),
        value_dim=text.positive("linear_value_head_dim", 128),
        conv_width=text.positive("linear_conv_kernel_dim", 4),
        gate_act=text.string("output_gate_type", text.string("hidden_act", "silu")) if defaults.has_streams else "silu",
    )
    text.allow("output_gate_type", found.gate_act, ("silu", "sigmoid"))
    if found.num_value_heads % found.num_key_heads or found.conv_width < 2:
        raise CheckpointError(
            f"{text.where}: linear_num_value_heads {found.num_value_heads} must be a multiple of linear_num_key_heads "
            f"{found.num_key_heads}, and linear_conv_kernel_dim {found.conv_width} 2 or more"
        )
    return found


def _mrope_section(text: Fields, defaults: ModelDefaults, head_dim: int) -> tuple[int, int, int]:
    """Read how many frequencies turn with time, height and width."""
    rope = rope_fields(text)
    factor = defaults.partial_rotary_factor
    rotary_dim = head_dim
    if factor != 1:
        factor = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", factor))
        rotary_dim = int(head_dim * factor)
    section = rope.integers("mrope_section", defaults.mrope_section or (rotary_dim // 2, 0, 0))
    if len(section) != 3 or sum(section) != rotary_dim // 2 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        what = "a head" if rotary_dim == head_dim else "what turns of a head"
        raise CheckpointError(
            f"{rope.where}: mrope_section is {list(section)}, and must be 3 numbers with the sum of half {what} "
            f"({rotary_dim}/2)"
        )
    return section


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise CheckpointError(f"eos_token_id is {value!r}, and must be a token id or a list of them")
        found.update(dict.fromkeys(ids))
    return tuple(found)
