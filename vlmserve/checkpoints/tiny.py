"""A tiny Qwen3-VL checkpoint with random weights, for tests and as the frame of larger random ones.

Its files are those of a published checkpoint (names of files, tensors and tokens), so every part of the server meets
what it will meet in earnest. Its answers are gibberish. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlmserve.checkpoints.chatml import SPECIAL_TOKENS, added_ids, make_tokenizer, write_tokenizer

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 128, 4, 4, 2, 32, 384
_VIT_HIDDEN, _VIT_DEPTH, _VIT_HEADS, _VIT_MLP = 64, 6, 4, 128
_PATCH, _TEMPORAL_PATCH, _MERGE, _GRID = 16, 2, 2, 16
_DEEPSTACK = (1, 3, 5)
_VOCABULARY = 768
_CONTEXT = 8192
_MIN_PIXELS, _MAX_PIXELS = 64 * 64, 1024 * 1024

_WORDS = """
A picture shows what a camera saw: a red circle, a blue square, two green triangles and a yellow star on white ground.
The circle is above the square, the star is to the left of the triangles, and nothing is in the lower right corner.
Describe this image in one sentence. How many shapes are there? Which colour is the largest one? Read the printed text.
In the morning the street was empty, but in the evening people were walking along the river with dogs and children.
She put the book on the table next to the window, opened it at the first page, and began to read with a quiet voice.
system user assistant You are a helpful assistant. The answer is yes. The answer is no. I can see that there are three.
Numbers: one two three four five six seven eight nine ten. Colours: black white red orange yellow green blue purple.
Ein Bild zeigt, was eine Kamera sah. Une image montre ce qu'une caméra a vu. Una imagen muestra lo que vio una cámara.
这张图片里有什么? 一个红色的圆和两个蓝色的正方形。 この写真には何が写っていますか。 На картинке красный круг.
def area(width, height): return width * height  # {"type": "image", "width": 640, "height": 480}
"""


def write_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """Write the checkpoint's files (about 5 MB) into an existing folder."""
    from safetensors.numpy import save_file

    tokenizer = make_tokenizer([_WORDS], _VOCABULARY)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ids = added_ids(tokenizer)
    write_tokenizer(folder, tokenizer, _CONTEXT)
    for name, content in (
        ("config.json", _config(ids)),
        ("generation_config.json", _generation_config(ids)),
        ("preprocessor_config.json", _image_processor_config()),
        ("video_preprocessor_config.json", _video_processor_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(
        dict(_tensors(vocabulary, np.random.default_rng(seed))), folder / "model.safetensors", metadata={"format": "pt"}
    )


def _config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": _VOCABULARY,
            "hidden_size": _HIDDEN,
            "intermediate_size": _MLP,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": _CONTEXT,
            "rope_theta": 5_000_000,
            # thirds of half a head: time, height, width
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "tie_word_embeddings": False,
            "dtype": "float32",
            "use_cache": True,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": _VIT_DEPTH,
            "hidden_size": _VIT_HIDDEN,
            "intermediate_size": _VIT_MLP,
            "num_heads": _VIT_HEADS,
            "out_hidden_size": _HIDDEN,
            "in_channels": 3,
            "patch_size": _PATCH,
            "temporal_patch_size": _TEMPORAL_PATCH,
            "spatial_merge_size": _MERGE,
            "num_position_embeddings": _GRID**2,
            "deepstack_visual_indexes": list(_DEEPSTACK),
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def _generation_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
    }


def _image_processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS},
        "patch_size": _PATCH,
        "temporal_patch_size": _TEMPORAL_PATCH,
        "merge_size": _MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _video_processor_config() -> dict[str, Any]:
    return _image_processor_config() | {
        "image_processor_type": None,
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": _MIN_PIXELS, "longest_edge": 16 * _MAX_PIXELS},
    }


def _silent_ids(vocabulary: dict[str, int]) -> list[int]:
    """Tokens made unlikely in answers: those of prompts, and parts of characters."""
    return [
        index
        for token, index in vocabulary.items()
        if token != "<|im_end|>" and (token in SPECIAL_TOKENS or not token.replace("Ġ", " ").isascii())
    ]


def _tensors(vocabulary: dict[str, int], rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by its published name, float32. Matrices keep the size of what goes through them, so that the
    answer depends on every part of the input (the usual 0.02 would answer the same to any picture), and attention is
    sharp and loud, so that answers do not fall into repeating one token."""

    def linear(name: str, rows: int, columns: int, *, bias: bool, gain: float = 1) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{name}.weight", rng.normal(0, gain / math.sqrt(columns), (rows, columns)).astype(np.float32)
        if bias:
            yield f"{name}.bias", rng.normal(0, 0.02, rows).astype(np.float32)

    def norm(name: str, size: int, *, bias: bool, mean: float = 1) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{name}.weight", rng.normal(mean, 0.1, size).astype(np.float32)
        if bias:
            yield f"{name}.bias", rng.normal(0, 0.02, size).astype(np.float32)

    text = "model.language_model"
    yield f"{text}.embed_tokens.weight", rng.normal(0, 1, (_VOCABULARY, _HIDDEN)).astype(np.float32)
    head = rng.normal(0, 0.3, (_VOCABULARY, _HIDDEN)).astype(np.float32)
    head[_silent_ids(vocabulary)] *= 0.2
    head[vocabulary["<|im_end|>"]] *= 1.4  # so that answers end before long
    yield "lm_head.weight", head
    for index in range(_LAYERS):
        layer = f"{text}.layers.{index}"
        yield from norm(f"{layer}.input_layernorm", _HIDDEN, bias=False)
        yield from linear(f"{layer}.self_attn.q_proj", _HEADS * _HEAD_DIM, _HIDDEN, bias=False)
        yield from linear(f"{layer}.self_attn.k_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, bias=False)
        yield from linear(f"{layer}.self_attn.v_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, bias=False)
        yield from linear(f"{layer}.self_attn.o_proj", _HIDDEN, _HEADS * _HEAD_DIM, bias=False, gain=3)
        yield from norm(f"{layer}.self_attn.q_norm", _HEAD_DIM, bias=False, mean=1.6)
        yield from norm(f"{layer}.self_attn.k_norm", _HEAD_DIM, bias=False, mean=1.6)
        yield from norm(f"{layer}.post_attention_layernorm", _HIDDEN, bias=False)
        yield from linear(f"{layer}.mlp.gate_proj", _MLP, _HIDDEN, bias=False)
        yield from linear(f"{layer}.mlp.up_proj", _MLP, _HIDDEN, bias=False)
        yield from linear(f"{layer}.mlp.down_proj", _HIDDEN, _MLP, bias=False)
    yield from norm(f"{text}.norm", _HIDDEN, bias=False)

    tower = "model.visual"
    pixels = (3, _TEMPORAL_PATCH, _PATCH, _PATCH)
    patch = rng.normal(0, 1 / math.sqrt(math.prod(pixels)), (_VIT_HIDDEN, *pixels))
    yield f"{tower}.patch_embed.proj.weight", patch.astype(np.float32)
    yield f"{tower}.patch_embed.proj.bias", rng.normal(0, 0.02, _VIT_HIDDEN).astype(np.float32)
    yield f"{tower}.pos_embed.weight", rng.normal(0, 0.3, (_GRID**2, _VIT_HIDDEN)).astype(np.float32)
    for index in range(_VIT_DEPTH):
        block = f"{tower}.blocks.{index}"
        yield from norm(f"{block}.norm1", _VIT_HIDDEN, bias=True)
        yield from norm(f"{block}.norm2", _VIT_HIDDEN, bias=True)
        yield from linear(f"{block}.attn.qkv", 3 * _VIT_HIDDEN, _VIT_HIDDEN, bias=True)
        yield from linear(f"{block}.attn.proj", _VIT_HIDDEN, _VIT_HIDDEN, bias=True)
        yield from linear(f"{block}.mlp.linear_fc1", _VIT_MLP, _VIT_HIDDEN, bias=True)
        yield from linear(f"{block}.mlp.linear_fc2", _VIT_HIDDEN, _VIT_MLP, bias=True)
    merged = _MERGE**2 * _VIT_HIDDEN
    mergers = [(f"{tower}.merger", _VIT_HIDDEN)]
    mergers += [(f"{tower}.deepstack_merger_list.{index}", merged) for index in range(len(_DEEPSTACK))]
    for merger, norm_size in mergers:
        yield from norm(f"{merger}.norm", norm_size, bias=True)
        yield from linear(f"{merger}.linear_fc1", merged, merged, bias=True)
        yield from linear(f"{merger}.linear_fc2", _HIDDEN, merged, bias=True)
