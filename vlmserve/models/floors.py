"""The least work of a step, from a model's shapes: bytes that have to be read, and floating-point operations.

Multiplying and adding count as two operations. All functions take outlines: models without weights, on the meta device.
"""

from __future__ import annotations

from torch import nn

from vision.towers.blocks import VisionTower, encoding_flops
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.config import ExpertsConfig, ModelConfig
from vlmserve.models.qwen4_exp.ngrams import NGramTable
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.experts import Experts


def expert_bytes(module: nn.Module) -> int:
    """Return the bytes of all experts in a module, without those that every token goes through."""
    return sum(weight_bytes(child) for child in module.modules() if isinstance(child, Experts))


def table_bytes(module: nn.Module) -> int:
    """Return the bytes of all n-gram tables in a module. Each token reads a few of their rows."""
    return sum(weight_bytes(child) for child in module.modules() if isinstance(child, NGramTable))


def part_hit(experts: ExpertsConfig | None, tokens: float) -> float:
    """Return the expected part of a layer's experts that so many tokens go through, if each token's are a random choice
    of their own. Texts choose less evenly, and so hit fewer."""
    return 0.0 if experts is None else 1 - (1 - experts.chosen / experts.count) ** tokens


def decode_bytes(outline: VisionLanguageModel, kv_tokens: float, *, requests: int) -> float:
    """Return the bytes that a decode step of so many requests reads: the weights of the decoder and the head once, and
    `kv_tokens` tokens of KV cache over all requests. Only experts that are hit count, as `part_hit` expects. Rows of
    the embedding and of n-gram tables, writes, and traffic between layers are left out. Sparse attention counts as if
    each request attended to all of its budget, and read the keys of its index once for a block."""
    decoder = outline.language_model
    head = decoder.embed_tokens if outline.lm_head is None else outline.lm_head
    missed = expert_bytes(decoder.layers) * (1 - part_hit(outline.config.experts, requests))
    weights = sum(weight_bytes(part) for part in (decoder.layers, decoder.norm, head) if part is not None)
    weights -= table_bytes(decoder.layers)
    index = outline.config.index
    if index is None:
        return weights - missed + kv_tokens * kv_bytes(outline.config, outline)
    seen = requests * min(kv_tokens / requests, index.most)
    return weights - missed + seen * kv_bytes(outline.config, outline) + kv_tokens * index_bytes(outline)


def kv_bytes(config: ModelConfig, outline: VisionLanguageModel) -> int:
    """Return the bytes of a token in a KV cache of the model's own dtype."""
    return KVCache.bytes_per_token(config.num_kv_layers, config.num_kv_heads, config.head_dim, outline.dtype)


def index_bytes(outline: VisionLanguageModel) -> float:
    """Return the bytes that a step reads of sparse attention's index for each token before; 0 without one."""
    config = outline.config
    if config.index is None:
        return 0.0
    return config.num_index_layers * config.index.head_dim * outline.dtype.itemsize / config.index.block


def prefill_flops(outline: VisionLanguageModel, tokens: int) -> float:
    """Return the operations of one prompt of so many tokens: products with the weights, causal attention, and the last
    token's logits."""
    config = outline.config
    layers = outline.language_model.layers
    weights = sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() > 1)
    if config.experts is not None:
        passed_by = 1 - config.experts.chosen / config.experts.count
        weights -= round(expert_bytes(layers) // outline.dtype.itemsize * passed_by)
    weights -= table_bytes(layers) // outline.dtype.itemsize
    return (
        2.0 * weights * tokens
        + attention_flops(config, config.num_kv_layers, tokens)
        + 2.0 * config.vocab_size * config.hidden_size
    )


def attention_flops(config: ModelConfig, layers: int, tokens: int) -> float:
    """Return the operations of causal attention in so many layers over one prompt, and of sparse attention's index."""
    pairs, index = tokens * (tokens + 1) / 2, config.index
    if index is None or tokens <= index.most:
        return 4.0 * layers * config.num_heads * config.head_dim * pairs
    scores = 2.0 * layers * index.heads * index.head_dim * pairs / index.block
    pairs = index.most * (index.most + 1) / 2 + (tokens - index.most) * index.most
    return 4.0 * layers * config.num_heads * config.head_dim * pairs + scores


def tower_flops(tower: VisionTower, pictures: int, patches: int) -> float:
    """Return the operations of so many pictures with `patches` patches each: products, and attention inside pictures
    and windows."""
    full = len(tower.blocks) if tower.full_attention is None else len(tower.full_attention)
    windowed = 4.0 * (len(tower.blocks) - full) * tower.patch_embed.width * patches * min(patches, tower.window_patches)
    return pictures * (encoding_flops(tower, patches) + windowed)
