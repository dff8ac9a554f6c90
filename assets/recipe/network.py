"""The network: a Qwen3-VL of a few million parameters, and the checkpoint folder it is published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from assets.recipe.chatml import added_ids, write_tokenizer
from assets.recipe.sizes import (
    CONTEXT,
    MAX_PIXELS,
    MERGE,
    MIN_PIXELS,
    PATCH,
    TEMPORAL_PATCH,
    VIDEO_MAX_PIXELS,
    VIDEO_MIN_PIXELS,
)
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

make_torchvision_importable()
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3VLConfig  # noqa: E402
from transformers import Qwen3VLForConditionalGeneration as Network  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

_ROWS = 4096  # of the vocabulary; more than there are tokens


def config_dict(ids: dict[str, int]) -> dict[str, Any]:
    """config.json. ids: of the special tokens."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": _ROWS,
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_hidden_layers": 6,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": CONTEXT,
            "rope_theta": 10_000,
            # thirds of half a head: time, height, width
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "use_cache": True,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 6,
            "hidden_size": 192,
            "intermediate_size": 640,
            "num_heads": 3,
            "out_hidden_size": 192,
            "in_channels": 3,
            "patch_size": PATCH,
            "temporal_patch_size": TEMPORAL_PATCH,
            "spatial_merge_size": MERGE,
            "num_position_embeddings": 16**2,
            "deepstack_visual_indexes": [2, 4],
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[B, heads, L, D] each -> [B, L, heads, D]. On a CPU twice as fast backwards as the fused kernel.

    attention_mask: bool [B, 1, L, L], true where a token is seen; None: all are.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query * scaling) @ key.transpose(-1, -2)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -1e4)
    return (scores.softmax(-1, dtype=scores.dtype) @ value).transpose(1, 2).contiguous(), None


def make_network(tokenizer: Tokenizer, seed: int) -> Network:
    """A new network, float32, random from `seed`."""
    torch.manual_seed(seed)
    config = Qwen3VLConfig(**config_dict(added_ids(tokenizer)))
    if not torch.cuda.is_available():
        AttentionInterface.register("plain", plain_attention)
        AttentionMaskInterface.register("plain", sdpa_mask)
    config._attn_implementation = "sdpa" if torch.cuda.is_available() else "plain"
    network = Network(config)
    with torch.no_grad():  # the usual 0.02 leaves positions and words too quiet in a network this narrow
        network.model.visual.pos_embed.weight.normal_(0, 0.2)
        network.model.language_model.embed_tokens.weight.normal_(0, 0.04)
    return network


def prime_patches(network: Network, patches: torch.Tensor) -> None:
    """Let the patch embedding begin as a cosine transform whose outputs vary equally over `patches` [n, 1536].

    Flat areas make up most of a picture, so a random embedding hears little but their colour, and edges, which tell
    shapes apart, take ten times as long to be found.
    """
    frequencies = sorted(((u, v) for u in range(PATCH) for v in range(PATCH)), key=lambda f: (sum(f), f))
    x = (torch.arange(PATCH) + 0.5) * torch.pi / PATCH
    waves = torch.stack([torch.cos(v * x)[:, None] * torch.cos(u * x) for u, v in frequencies])
    waves /= waves.flatten(1).norm(dim=1)[:, None, None]
    opponent = torch.tensor([[1.0, 1, 1], [1, -1, 0], [0.5, 0.5, -1]])  # brightness, red-green, yellow-blue
    conv = network.model.visual.patch_embed.proj
    rows = conv.weight.shape[0]
    per_channel = rows // len(opponent)
    weight = torch.einsum("kc,fyx->kfcyx", opponent, waves[:per_channel]).reshape(rows, 3, 1, PATCH, PATCH)
    weight = weight.expand(-1, -1, TEMPORAL_PATCH, -1, -1) / TEMPORAL_PATCH
    spread = (patches.float() @ weight.flatten(1).T).std(0)
    with torch.no_grad():
        conv.weight.copy_(weight / spread.clamp(min=1e-3)[:, None, None, None, None])
        conv.bias.zero_()


def write_checkpoint(folder: Path, network: Network, tokenizer: Tokenizer) -> None:
    """A folder that transformers and vlmserve load, weights in bfloat16."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    ids = added_ids(tokenizer)
    config = config_dict(ids)
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": False,
    }
    pictures: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    videos = {k: v for k, v in pictures.items() if k != "image_processor_type"} | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": VIDEO_MIN_PIXELS, "longest_edge": VIDEO_MAX_PIXELS},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 32,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("preprocessor_config.json", pictures),
        ("video_preprocessor_config.json", videos),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder, tokenizer, CONTEXT)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in network.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
