"""What a step cannot do without: bytes that have to be read, and floating-point operations, from a model's shapes.

Multiplying and adding count as two operations. All takes outlines: models without weights, on the meta device.
"""

from __future__ import annotations

from vision.towers.blocks import VisionTower
from vision.towers.cost import encoding_flops
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.config import ModelConfig
from vlmserve.models.vlm import VisionLanguageModel


def decode_bytes(outline: VisionLanguageModel, kv_tokens: float) -> float:
    """Bytes that a decode step reads: all weights of the decoder and the head once, however many requests there are,
    and `kv_tokens` tokens of KV cache, over all of them. The embedding's few rows, what is written, and what passes
    between the layers are left out."""
    decoder = outline.language_model
    head = decoder.embed_tokens if outline.lm_head is None else outline.lm_head
    weights = sum(weight_bytes(part) for part in (decoder.layers, decoder.norm, head) if part is not None)
    return weights + kv_tokens * kv_bytes(outline.config, outline)


def kv_bytes(config: ModelConfig, outline: VisionLanguageModel) -> int:
    """Bytes of a token in a KV cache of the model's own dtype."""
    return KVCache.bytes_per_token(config.num_kv_layers, config.num_kv_heads, config.head_dim, outline.dtype)


def prefill_flops(outline: VisionLanguageModel, tokens: int) -> float:
    """Of one prompt of so many tokens: products with the weights, causal attention, and the last token's logits."""
    config = outline.config
    weights = sum(parameter.numel() for parameter in outline.language_model.layers.parameters() if parameter.dim() > 1)
    pairs = tokens * (tokens + 1) / 2
    attention = 4.0 * config.num_kv_layers * config.num_heads * config.head_dim * pairs
    return 2.0 * weights * tokens + attention + 2.0 * config.vocab_size * config.hidden_size


def tower_flops(tower: VisionTower, pictures: int, patches: int) -> float:
    """Of so many pictures with `patches` patches each: products, and attention inside pictures and windows."""
    full = len(tower.blocks) if tower.num_full_attention is None else tower.num_full_attention
    windowed = 4.0 * (len(tower.blocks) - full) * tower.patch_embed.width * patches * min(patches, tower.window_patches)
    return pictures * (encoding_flops(tower, patches) + windowed)
