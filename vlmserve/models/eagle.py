"""An EAGLE-3 head (arXiv:2503.01840), which guesses further tokens of a model that it was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmserve.memory.kv_cache import KVShape
from vlmserve.models.attention.base import ForwardBatch
from vlmserve.models.config import ModelConfig, ModelDefaults, read_model_config
from vlmserve.models.decoder import DecoderAttention
from vlmserve_common.checkpoint.fields import Fields, read_json
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.checkpoint.rope import rope_fields
from vlmserve_common.checkpoint.weights import WeightRules, match_weights
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.communicator import ALONE
from vlmserve_common.compute.layers import Embedding, GatedMLP, RMSNorm
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.rotary import MRotary, Rotation, contiguous_axes, interleaved_axes
from vlmserve_common.compute.tensors import give_memory
from vlmserve_common.errors import CheckpointError

# Two published layouts: the authors' own, and that of the speculators library.
_RULES = WeightRules(prefixes=(("model.", ""), ("layers.0.", "midlayer.")), ignored=(r"\brotary_emb\.inv_freq$",))
_VOCABULARIES = frozenset(("d2t", "t2d"))


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """A head's sizes. decoder: its only layer; vocab_size is the target's. taps: the layers of the target whose input
    it reads; the number of layers stands for the output of the last one. target_size: hidden size of the target.
    draft_vocab: tokens that it may guess. norm_first: what the layer adds to is normalised. turns_by_place: its rotary
    positions are places of tokens, not those of the target. interleaved: see `compute.rotary.interleaved_axes`.
    has_embedding, has_head: it has its own, not the target's."""

    decoder: ModelConfig
    taps: tuple[int, ...]
    target_size: int
    draft_vocab: int
    norm_first: bool
    turns_by_place: bool
    interleaved: bool
    has_embedding: bool
    has_head: bool


class EagleLayer(nn.Module):
    """A decoder layer whose attention sees embedding and hidden state side by side."""

    def __init__(self, config: EagleConfig, layer_id: int) -> None:
        super().__init__()
        decoder, size, eps = config.decoder, config.decoder.hidden_size, config.decoder.rms_norm_eps
        bias = decoder.attention_bias
        self.self_attn = DecoderAttention(
            decoder, ALONE, layer_id, qkv_bias=bias, out_bias=bias, in_features=2 * decoder.hidden_size
        )
        self.mlp = GatedMLP(size, decoder.intermediate_size, activation(decoder.hidden_act), bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self._norm_first = config.norm_first

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """embeds, hidden [N, hidden] -> [N, hidden]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        x = self.self_attn(x, rotary, forward_batch, residual=normed if self._norm_first else hidden)
        return self.mlp(self.post_attention_layernorm(x), residual=x)

    def store(self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> None:
        """Write keys and values only."""
        self.self_attn.store(
            torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1), rotary, forward_batch
        )


class EagleHead(nn.Module):
    """One decoder layer over entries. The entry of token i joins features of token i - 1 with the embedding of token i,
    and predicts token i + 1. It has the rotary position of token i - 1.

    Features are made of the target's hidden states before three of its layers. Those of token i, and the keys and
    values of entry i, lie in the KV slot of token i, in two layers of the cache behind those of the target. So a slot
    depends on the tokens up to its own, and is shared, moved and dropped as the target's KV is. The first token has no
    entry, and nothing attends to its slot.

    For a further guess, the layer's output takes the features' place. Each process of a divided model has all of it.
    first_layer: number of its first layer in the cache.
    """

    d2t: torch.Tensor

    def __init__(self, config: EagleConfig, dtype: torch.dtype, first_layer: int) -> None:
        super().__init__()
        decoder = config.decoder
        self.config = config
        self.fc = Linear(len(config.taps) * config.target_size, decoder.hidden_size, bias=False)
        self.embed_tokens = Embedding(decoder.vocab_size, decoder.hidden_size) if config.has_embedding else None
        self.midlayer = EagleLayer(config, first_layer)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.lm_head = Linear(decoder.hidden_size, config.draft_vocab, bias=False) if config.has_head else None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64), persistent=False)
        axes = interleaved_axes if config.interleaved else contiguous_axes
        self._rotary = MRotary(decoder.head_dim, decoder.rope, axes(decoder.mrope_section), dtype)
        self._features = first_layer + 1

    @property
    def kv_shapes(self) -> tuple[KVShape, KVShape]:
        """The shapes of its layers of the cache."""
        decoder = self.config.decoder
        return KVShape(decoder.num_kv_heads, decoder.head_dim), KVShape(1, decoder.hidden_size // 2)

    def write(self, tapped: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Store the features of a step's tokens, made of the last of the target's hidden states [n, N, hidden]."""
        inputs = tapped[-len(self.config.taps) :].transpose(0, 1).flatten(1)
        k, v = self.fc(inputs)[:, None].chunk(2, dim=-1)
        forward_batch.kv_cache.write(self._features, forward_batch.out_cache_loc, k, v)

    def features(self, slots: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Return the features [n, hidden] of tokens in slots int64 [n]."""
        parts = forward_batch.kv_cache.read(self._features, slots, self.norm.weight.dtype)
        return torch.cat(parts, dim=-1).flatten(1)

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of N entries. Return what takes the features' place for a further guess, and what logits are
        made of, [N, hidden] each.

        embeds [N, hidden]: of the entries' tokens. features [N, hidden], positions int64 [3, N]: of the tokens before.
        """
        x = self.midlayer(embeds, features, self._rotary(positions), forward_batch)
        return x, self.norm(x)

    def store(
        self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> None:
        """Write the KV of entries that nothing is guessed from: with a single layer, it needs no attention."""
        self.midlayer.store(embeds, features, self._rotary(positions), forward_batch)

    def join(self, x: torch.Tensor) -> None:
        """Do nothing while other groups have entries: each process has all of the layer."""

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids of the head's own, int64 [N]."""
        return ids + self.d2t[ids]


def has_own_embedding(folder: Path) -> bool:
    """Return True if the head in a checkpoint folder embeds tokens itself. CheckpointError."""
    return any(_RULES.our_name(name) == "embed_tokens.weight" for name in CheckpointReader(folder).tensors)


def load_eagle_head(
    folder: Path, config: EagleConfig, *, first_layer: int, device: torch.device | str, dtype: torch.dtype
) -> EagleHead:
    """Load a head from a checkpoint folder; on the meta device, make its outline. config: of `read_eagle_config`.
    first_layer: see `EagleHead`. CheckpointError for tensors that do not fit."""
    reader = CheckpointReader(folder)
    with torch.device("meta"):
        head = EagleHead(config, dtype, first_layer).to(dtype)
    device = torch.device(device)
    if device.type == "meta":
        match_weights(head, reader, _RULES, passed_over=_VOCABULARIES)
        return head
    give_memory(head, device)
    head.d2t = torch.zeros(config.draft_vocab, dtype=torch.int64, device=device)
    reader.read_into(match_weights(head, reader, _RULES, passed_over=_VOCABULARIES))
    if "d2t" in reader.tensors:
        reader.read_into([(reader.tensors["d2t"], head.d2t)])
        ids = head.target_ids(torch.arange(config.draft_vocab, device=device))
        vocab = config.decoder.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise CheckpointError(
                f"{folder}: d2t names tokens {int(ids.min())} .. {int(ids.max())}, and its target has {vocab}"
            )
    return head.eval()


def read_eagle_config(folder: Path, target: ModelConfig, name: str) -> EagleConfig:
    """Read the sizes of a head for `target`, a whole model called `name`. CheckpointError for a folder that has no
    head, or one for another model."""
    reader, hf_config = CheckpointReader(folder), _plain(folder)
    top = Fields(hf_config, f"{folder}/config.json")
    kinds = [*top.values.get("architectures", ()), top.values.get("speculators_model_type", "")]
    if not any("eagle3" in str(kind).lower() for kind in kinds):
        raise CheckpointError(
            f"{folder}: architectures is {kinds[:-1]}, and an EAGLE-3 head has LlamaForCausalLMEagle3"
        )
    top.allow("num_hidden_layers", top.integer("num_hidden_layers", 1), (1,))
    decoder = read_model_config(hf_config, {}, ModelDefaults(rope_theta=10_000.0))
    rope = rope_fields(top)
    target_size = top.positive("target_hidden_size", decoder.hidden_size)
    found = {_RULES.our_name(one) for one in reader.tensors}
    for what, own, theirs in (
        ("hidden states", target_size, target.hidden_size),
        ("a vocabulary", decoder.vocab_size, target.vocab_size),
        ("model_type", top.string("target_model_type", target.family), target.family),
    ):
        if own != theirs:
            raise CheckpointError(f"{folder} is a head for a model with {what} of {own}, and {name} has {theirs}")
    if "embed_tokens.weight" not in found and decoder.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{folder}: there is no embed_tokens, and the target's embeddings have {target.hidden_size} elements, not "
            f"{decoder.hidden_size}"
        )
    draft_vocab = top.positive("draft_vocab_size", decoder.vocab_size)
    for tensor, size in (("d2t", draft_vocab), ("t2d", target.vocab_size)):
        shape = reader.tensors[tensor].shape if tensor in reader.tensors else (size,)
        if shape != (size,) or (draft_vocab != target.vocab_size and "d2t" not in reader.tensors):
            raise CheckpointError(
                f"{folder}: d2t and t2d must map {draft_vocab} tokens of the head to the {target.vocab_size} of "
                f"{name}, and {tensor} is {list(shape) if tensor in reader.tensors else 'missing'}"
            )
    return EagleConfig(
        decoder=decoder,
        taps=_taps(top, target),
        target_size=target_size,
        draft_vocab=draft_vocab,
        norm_first=top.flag("norm_before_residual", False),
        turns_by_place=not rope.has("mrope_section"),
        interleaved=rope.flag("mrope_interleaved", target.family.startswith("qwen3")),
        has_embedding="embed_tokens.weight" in found,
        has_head="lm_head.weight" in found or draft_vocab != target.vocab_size,
    )


def _plain(folder: Path) -> Mapping[str, Any]:
    """Return config.json with the layer's own fields beside the others."""
    hf_config = read_json(folder, "config.json")
    return {"model_type": "llama", **hf_config.get("transformer_layer_config", {}), **hf_config}


def _taps(top: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose input is read. `eagle_config` counts outputs of layers instead, from 0 on."""
    layers = target.num_layers
    taps = top.integers("eagle_aux_hidden_state_layer_ids", ())
    if not taps:
        outputs = top.section("eagle_config").integers("eagle_aux_hidden_state_layer_ids", ())
        taps = tuple(one + 1 for one in outputs) or (2, layers // 2, layers - 3)
    if len(set(taps)) < len(taps) or list(taps) != sorted(taps) or not 0 <= taps[0] <= taps[-1] <= layers:
        raise CheckpointError(
            f"{top.where}: it reads hidden states before layers {list(taps)}, which must ascend and be at most {layers}"
        )
    return taps
