"""What a step cannot do without: bytes that have to be read, and floating-point operations, from a model's shapes.

Multiplying and adding count as two operations. All takes outlines: models without weights, on the meta device.
"""

from __future__ import annotations

from torch import nn

from vision.towers.blocks import VisionTower, encoding_flops
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.config import ExpertsConfig, ModelConfig
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.experts import Experts


def expert_bytes(module: nn.Module) -> int:
    """Of all experts in a module, apart from those that every token goes through."""
    return sum(weight_bytes(child) for child in module.modules() if isinstance(child, Experts))


def part_hit(experts: ExpertsConfig | None, tokens: float) -> float:
    """How many of a layer's experts so many tokens go through, as a part of all: the expectation where each token's are
    a random choice of their own. Texts choose less evenly, and so hit fewer."""
    return 0.0 if experts is None else 1 - (1 - experts.chosen / experts.count) ** tokens


def decode_bytes(outline: VisionLanguageModel, kv_tokens: float, *, requests: int) -> float:
    """Bytes that a decode step of so many requests reads: the weights of the decoder and the head once, but of experts
    only those that are hit, as `part_hit` expects; and `kv_tokens` tokens of KV cache, over all requests. The
    embedding's few rows, what is written, and what passes between the layers are left out."""
    decoder = outline.language_model
    head = decoder.embed_tokens if outline.lm_head is None else outline.lm_head
    missed = expert_bytes(decoder.layers) * (1 - part_hit(outline.config.experts, requests))
    weights = sum(weight_bytes(part) for part in (decoder.layers, decoder.norm, head) if part is not None)
    return weights - missed + kv_tokens * kv_bytes(outline.config, outline)


def kv_bytes(config: ModelConfig, outline: VisionLanguageModel) -> int:
    """Bytes of a token in a KV cache of the model's own dtype."""
    return KVCache.bytes_per_token(config.num_kv_layers, config.num_kv_heads, config.head_dim, outline.dtype)


def prefill_flops(outline: VisionLanguageModel, tokens: int) -> float:
    """Of one prompt of so many tokens: products with the weights, causal attention, and the last token's logits."""
    config = outline.config
    layers = outline.language_model.layers
    weights = sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() > 1)
    if config.experts is not None:
        passed_by = 1 - config.experts.chosen / config.experts.count
        weights -= round(expert_bytes(layers) // outline.dtype.itemsize * passed_by)
    return (
        2.0 * weights * tokens
        + attention_flops(config, config.num_kv_layers, tokens)
        + 2.0 * config.vocab_size * config.hidden_size
    )


def attention_flops(config: ModelConfig, layers: int, tokens: int) -> float:
    """Of causal attention in so many layers over one prompt."""
    return 4.0 * layers * config.num_heads * config.head_dim * tokens * (tokens + 1) / 2


def tower_flops(tower: VisionTower, pictures: int, patches: int) -> float:
    """Of so many pictures with `patches` patches each: products, and attention inside pictures and windows."""
    full = len(tower.blocks) if tower.full_attention is None else len(tower.full_attention)
    windowed = 4.0 * (len(tower.blocks) - full) * tower.patch_embed.width * patches * min(patches, tower.window_patches)
    return pictures * (encoding_flops(tower, patches) + windowed)
