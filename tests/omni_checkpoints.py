"""Tiny random checkpoints of the Omni families, written as published ones are, and sounds to send."""

from __future__ import annotations

import io
import json
import math
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from tokenizers import AddedToken

from tests import hf_env  # noqa: F401
from tests.tiny_checkpoints import MAX_POSITIONS, VOCAB_SIZE, make_tokenizer, write_safetensors

# isort: split
from transformers import (
    AutoConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

THINKERS = {
    "qwen2_5_omni": Qwen2_5OmniThinkerForConditionalGeneration,
    "qwen3_omni_moe": Qwen3OmniMoeThinkerForConditionalGeneration,
}
FAMILIES = tuple(THINKERS)
_ROLES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type == 'audio' %}{{ '<|audio_start|><|audio_pad|><|audio_end|>' }}
{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def make_omni_checkpoint(family: str, folder: Path, *, seed: int = 0, longest_s: int = 6) -> Path:
    """Write a checkpoint of one of `FAMILIES`, and return its folder. longest_s: what Qwen2.5-Omni hears."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in _ROLES.values() if "audio" in text]
    )
    ids = {role: tokenizer.token_to_id(text) for role, text in _ROLES.items()}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    old = family == "qwen2_5_omni"
    patch = 14 if old else 16
    files: dict[str, dict[str, Any]] = {
        "config.json": _config(family, ids, tokenizer.token_to_id("<|im_end|>")),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": MAX_POSITIONS,
            "extra_special_tokens": _ROLES,
            **_ROLES,
        },
        "preprocessor_config.json": {
            "chunk_length": longest_s,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "hop_length": 160,
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "min_pixels": 4 * (2 * patch) ** 2,
            "max_pixels": 64 * (2 * patch) ** 2,
            "merge_size": 2,
            "n_fft": 400,
            "patch_size": patch,
            "processor_class": "Qwen2_5OmniProcessor" if old else "Qwen3OmniMoeProcessor",
            "return_attention_mask": True,
            "sampling_rate": 16000,
            "temporal_patch_size": 2,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    write_safetensors(folder, _tensors(folder, seed))
    return folder


def _config(family: str, ids: dict[str, int], end: int) -> dict[str, Any]:
    old = family == "qwen2_5_omni"
    text = {
        "model_type": f"{family}_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 500.0,
        "eos_token_id": end,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "model_type": f"{family}_vision_encoder",
        "depth": 3,
        "num_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "patch_size": 14 if old else 16,
    }
    audio = {
        "model_type": f"{family}_audio_encoder",
        "num_mel_bins": 128,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "output_dim": 64,
        "n_window": 100 if old else 50,
    }
    if old:
        vision |= {"hidden_act": "silu", "fullatt_block_indexes": [1], "tokens_per_second": 25}
    else:
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        audio |= {"n_window_infer": 200, "downsample_hidden_size": 8}
        text |= {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    suffix = "index" if old else "id"
    thinker = {
        "model_type": f"{family}_thinker",
        "text_config": text,
        "vision_config": vision,
        "audio_config": audio,
        **{f"{kind}_token_{suffix}": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "position_id_per_seconds": 25 if old else 13,
        "seconds_per_chunk": 2,
        "dtype": "float32",
    }
    name = "Qwen2_5OmniForConditionalGeneration" if old else "Qwen3OmniMoeForConditionalGeneration"
    return {"architectures": [name], "model_type": family, "thinker_config": thinker, "dtype": "float32"}


def _tensors(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights in the published names, so large that answers depend on what is seen and heard."""
    generator = torch.Generator().manual_seed(seed)
    found = {"talker.model.embed_tokens.weight": torch.zeros(2, 3), "code2wav.bias": torch.zeros(2)}
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        thinker = THINKERS[config.model_type](config.thinker_config)
    for name, value in sorted(thinker.state_dict().items()):
        noise = torch.randn(value.shape, generator=generator)
        if noise.ndim == 1:
            is_scale = "norm" in name.split(".")[-2] or name.split(".")[-2].startswith(("ln", "norm"))
            made = (1.0 if name.endswith("weight") and is_scale else 0.0) + 0.1 * noise
        elif name.endswith(("embed_tokens.weight", "pos_embed.weight")):
            made = noise * 0.1
        else:
            made = noise * 1.2 / math.sqrt(noise[0].numel() if ".experts." not in name else noise.shape[-1])
        if name == "lm_head.weight":
            made *= 2
        published = name.removeprefix("model.") if name.startswith(("model.visual", "model.audio")) else name
        found |= _published(f"thinker.{published.replace('model.language_model.', 'model.')}", made)
    return found


def _published(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor in the published layout: experts one by one."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value}
    place, _, kind = name.rpartition(".")
    parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {"down_proj": 0}
    return {
        f"{place}.{expert}.{part}.weight": rows.chunk(len(parts))[half]
        for expert, rows in enumerate(value)
        for part, half in parts.items()
    }


def tone(seconds: float, rate: int = 16000, *, seed: int = 0) -> np.ndarray:
    """Return a sound of gliding tones and some noise: float32 [n], below 1."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    sound = 0.02 * rng.standard_normal(len(time))
    for _ in range(3):
        pitch, glide, loud = rng.uniform(100, 2500), rng.uniform(-80, 80), rng.uniform(0.05, 0.25)
        sound += loud * np.sin(2 * np.pi * (pitch + glide * time) * time) * (np.sin(3 * time) > rng.uniform(-1, 0.5))
    return sound.clip(-0.99, 0.99).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    """Return a WAV file of 16 bits. samples: float32 [n] or [n, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def heard(data: bytes) -> np.ndarray:
    """Return the samples of a WAV file of 16 bits and one channel, as the model gets them."""
    with wave.open(io.BytesIO(data)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def clip(
    seconds: float,
    samples: np.ndarray | None,
    *,
    side: int = 64,
    rate: int = 4,
    seed: int = 0,
    pictures: Sequence[np.ndarray] | None = None,
) -> bytes:
    """Return an MP4 file of coloured frames, or of `pictures`, losslessly encoded, with a sound track if there are
    samples."""
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={"strict": "experimental"}) as container:
        video = container.add_stream("libx264rgb", rate=rate, options={"crf": "0"})
        video.width = video.height = side
        video.pix_fmt = "rgb24"
        sound = None if samples is None else container.add_stream("alac", rate=16000, layout="mono")
        for number in range(round(seconds * rate)):
            squares = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            pixels = np.kron(squares, np.ones((side // 4, side // 4, 1), np.uint8))
            pixels = pixels if pictures is None else pictures[number]
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        if sound is not None and samples is not None:
            whole = (samples * 32767).round().astype(np.int16)
            frame = av.AudioFrame.from_ndarray(whole[None], format="s16p", layout="mono")
            frame.sample_rate = 16000
            container.mux(sound.encode(frame))
            container.mux(sound.encode())
    return file.getvalue()
