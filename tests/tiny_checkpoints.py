"""Tiny random checkpoints of the families, written as published ones are.

The weights are scaled so that answers depend on the pixels and greedy choices have clear margins (a default
initialisation of 0.02 answers the same whatever the picture shows). Only printable ASCII tokens are likely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests import hf_env  # noqa: F401
from vlmserve_common.checkpoint.hf_config import ARCHITECTURES
from vlmserve_common.compute.experts import ExpertLayout

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MOE = "qwen3_vl_moe"
HYBRID, HYBRID_MOE = "qwen3_5", "qwen3_5_moe"
HYBRIDS = (HYBRID, HYBRID_MOE)
STREAMED = "qwen4_exp"
ALL_FAMILIES = (*FAMILIES, MOE)
"""With those that differ from one of `FAMILIES` in the decoder alone; `HYBRIDS` differ in what they cache, too."""

STREAMED_MIXERS = ("linear_attention", "full_attention") * 2
MIXERS = ("linear_attention", "full_attention", "linear_attention")
VOCAB_SIZE = 448
BPE_SIZE = 400
MAX_POSITIONS = 1024
_WORDS = "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start"
_WORDS += " vision_end vision_pad image_pad video_pad"
SPECIAL_TOKENS = tuple(f"<|{word}|>" for word in _WORDS.split())
_TRAINING_TEXT = (
    "system user assistant You are a helpful assistant. Describe this picture in one sentence, please. What is in the "
    "image? How many red circles are there on the left side of the blue square? Count the shapes, name their colours "
    "and read the text that is printed above. The answer is that there are three of them. 图片 描述 你好 世界 ünïcödé"
)
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
_SYSTEM = {"qwen2_vl": "You are a helpful assistant.", "qwen2_5_vl": "You are a helpful assistant."}
_PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' and SYSTEM %}
{{- '<|im_start|>system\\n' + SYSTEM + '<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type in ('video', 'video_url') %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_checkpoint(
    family: str,
    out_dir: Path,
    *,
    dtype: str = "float32",
    tied: bool | None = None,
    shards: int = 1,
    seed: int = 0,
    deepstack: Sequence[int] = (1, 2),
    nested_names: bool | None = None,
    experts: ExpertLayout = "inputs_first",
    mixers: Sequence[str] = MIXERS,
    mtp: bool = False,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint of `family` (one of ALL_FAMILIES, HYBRIDS and STREAMED) into `out_dir` and return it.

    tied: whether lm_head is the embedding; default as in the family's small published models.
    deepstack: tower layers whose rows Qwen3-VL adds to the decoder's first layers.
    nested_names: `model.language_model.*`/`model.visual.*` rather than `model.*`/`visual.*`; default as published.
    experts: how the weights of experts are stored. mixers: what the layers of `HYBRIDS` are. mtp: with the head of
    `HYBRIDS` or STREAMED that guesses further tokens, whose experts `HYBRIDS` have one by one. sizes: other ones of the
    decoder.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    tied = family not in ("qwen2_5_vl", MOE, HYBRID_MOE, STREAMED) if tied is None else tied
    nested_names = not family.startswith("qwen2") if nested_names is None else nested_names
    mixers = STREAMED_MIXERS if family == STREAMED and mixers is MIXERS else mixers
    tokenizer = make_tokenizer()
    config = make_config(family, tokenizer, dtype=dtype, tied=tied, deepstack=deepstack, mixers=mixers)
    config.get("text_config", config).update(sizes)
    _write_json(out_dir / "config.json", config)
    _write_tokenizer(out_dir, tokenizer, _SYSTEM.get(family, ""))
    text = config.get("text_config", config)
    _write_json(
        out_dir / "generation_config.json",
        {
            "bos_token_id": text["bos_token_id"],
            "pad_token_id": text["bos_token_id"],
            "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), text["bos_token_id"]],
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "transformers_version": "4.57.0",
        },
    )
    _write_processor_configs(out_dir, family)
    tensors = _random_tensors(out_dir, tokenizer, tied, seed)
    head = _mtp_head(tensors, mixers.index("full_attention"), seed) if mtp else {}
    tensors = _store_experts(tensors, "outputs_first" if family in (HYBRID_MOE, STREAMED) else experts)
    tensors = _cut_tables(tensors, config.get("text_config", {}).get("split_ngram_parts", 1))
    tensors |= _store_experts(head, "outputs_first" if family == STREAMED else "each")
    if not nested_names:
        tensors = {_flat_name(name): value for name, value in tensors.items()}
    write_safetensors(out_dir, {name: value.to(getattr(torch, dtype)) for name, value in tensors.items()}, shards)
    return out_dir


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges and Qwen's special tokens right behind the BPE ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=BPE_SIZE, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([_TRAINING_TEXT] * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def make_config(
    family: str, tokenizer: Tokenizer, *, dtype: str, tied: bool, deepstack: Sequence[int], mixers: Sequence[str]
) -> dict[str, Any]:
    """config.json as published checkpoints of the family have it: Qwen2/2.5-VL flat, Qwen3-VL nested."""
    top: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "transformers_version": "4.57.0",
        "tie_word_embeddings": tied,
    }
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500.0,
        "attention_dropout": 0.0,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    vision: dict[str, Any] = {"depth": 4, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if not family.startswith("qwen2"):
        text |= {
            "model_type": f"{family}_text",
            "attention_bias": False,
            "head_dim": 32,
            "dtype": dtype,
            "tie_word_embeddings": tied,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
        }
        vision |= {
            "model_type": family,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "patch_size": 16,
            "in_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(deepstack),
            "initializer_range": 0.02,
        }
        if family in (*HYBRIDS, STREAMED):
            vision["deepstack_visual_indexes"] = []
            text |= {
                "layer_types": list(mixers),
                "mtp_num_hidden_layers": 1,
                "num_hidden_layers": len(mixers),
                "attn_output_gate": True,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 32,
                "linear_value_head_dim": 24,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": text.pop("rope_theta"),
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [2, 1, 1],
                },
            }
            del text["rope_scaling"]
        if family in (MOE, HYBRID_MOE, STREAMED):
            text |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        if family in (HYBRID_MOE, STREAMED):
            del text["intermediate_size"]
            text["shared_expert_intermediate_size"] = 24
        if family == STREAMED:
            del text["attn_output_gate"]
            text |= {
                "eos_token_id": text["bos_token_id"],
                "output_gate_type": "sigmoid",
                "hc_count": 4,
                "hc_lowrank": 16,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 32,
                "indexer_compress_ratio": 4,
                "ple_layer_ids": [1, 3],
                "ple_embed_dim": 6 * 8,
                "ngram_size": 3,
                "heads_per_ngram": 3,
                "ngram_vocab_size_base": 100,
                "make_ngram_vocab_size_divisible_by": 64,
                "split_ngram_parts": 5,
            }
        if family == MOE:
            text |= {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [1]}
        return top | {"text_config": text, "vision_config": vision}
    text |= {
        "torch_dtype": dtype,
        "use_sliding_window": False,
        "sliding_window": MAX_POSITIONS,
        "max_window_layers": 3,
        "vision_token_id": tokenizer.token_to_id("<|vision_pad|>"),
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    vision |= {"in_chans": 3, "patch_size": 14, "spatial_patch_size": 14}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 52,
            "out_hidden_size": 64,
            "hidden_act": "silu",
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
        }
    return top | text | {"vision_config": vision}


def write_safetensors(out_dir: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """model.safetensors, or `shards` files and their index; replaces what is there."""
    for old in [*out_dir.glob("*.safetensors"), *out_dir.glob("*.index.json")]:
        old.unlink()
    names = sorted(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, out_dir / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    _write_json(
        out_dir / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _write_tokenizer(out_dir: Path, tokenizer: Tokenizer, system: str) -> None:
    tokenizer.save(str(out_dir / "tokenizer.json"))
    template = _TEMPLATE.replace("SYSTEM", repr(system))
    (out_dir / "chat_template.jinja").write_text(template)
    added = {
        str(tokenizer.token_to_id(token)): {"content": token, "special": True}
        | dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        for token in SPECIAL_TOKENS
    }
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": added,
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "chat_template": template,
        },
    )


def _write_processor_configs(out_dir: Path, family: str) -> None:
    """4 to 64 merged tokens a picture."""
    old = family.startswith("qwen2")
    patch = 14 if old else 16
    smallest, largest = 4 * (2 * patch) ** 2, 64 * (2 * patch) ** 2
    image: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessorFast" if not old else "Qwen2VLImageProcessor",
        "processor_class": _PROCESSORS.get(family, "Qwen3VLProcessor"),
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073] if old else [0.5, 0.5, 0.5],
        "image_std": [0.26862954, 0.26130258, 0.27577711] if old else [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    video = {name: value for name, value in image.items() if name != "image_processor_type"}
    video["video_processor_type"] = "Qwen2VLVideoProcessor" if old else "Qwen3VLVideoProcessor"
    video["size"] = {"shortest_edge": smallest, "longest_edge": (16 if old else 192) * (2 * patch) ** 2}
    if old:
        image |= {"min_pixels": smallest, "max_pixels": largest}
    else:
        image |= {"size": {"shortest_edge": smallest, "longest_edge": largest}}
    _write_json(out_dir / "preprocessor_config.json", image)
    _write_json(out_dir / "video_preprocessor_config.json", video)


# Standard deviations are gain / sqrt(fan_in); the first fragment found in the name counts.
_GAINS = (
    ("visual.merger", 1.0),
    ("visual.deepstack", 1.0),
    ("visual", 0.8),
    ("q_proj", 1.2),
    ("k_proj", 1.2),
    ("o_proj", 1.5),
    ("mlp.gate.weight", 3.0),
    ("", 1.2),
)
_EMBED_STD = 0.05
_LOGIT_STD = 2.5


def _random_tensors(out_dir: Path, tokenizer: Tokenizer, tied: bool, seed: int) -> dict[str, torch.Tensor]:
    """A state dict in transformers' own (nested) names, float32, without lm_head when tied."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(out_dir))
    # hashes, whole numbers, follow from the configuration
    shapes = {name: value.shape for name, value in model.state_dict().items() if value.is_floating_point()}
    if tied:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    unlikely = _unlikely_tokens(tokenizer)
    tensors = {}
    for name in sorted(shapes):
        value = torch.randn(shapes[name], generator=generator)
        tensors[name] = _scaled(name, value, tied, unlikely, generator)
        if model.config.model_type in (*HYBRIDS, STREAMED) and _is_zero_centred(name):
            tensors[name] -= 1
    return tensors


def _mtp_head(tensors: dict[str, torch.Tensor], like: int, seed: int) -> dict[str, torch.Tensor]:
    """A head like attention layer number `like`, with a mixer of streams in place of a norm if the model has one."""
    text, generator = "model.language_model.", torch.Generator().manual_seed(seed + 1)
    own = {f"{text}layers.{like}.": "layers.0.", f"{text}hyper_": "hyper_"}
    shapes = {
        name.replace(theirs, ours): t.shape
        for name, t in tensors.items()
        for theirs, ours in own.items()
        if name.startswith(theirs)
    }
    size = tensors[f"{text}embed_tokens.weight"].shape[1]
    (width,) = shapes.get("hyper_connection_mixer.hc_norm.weight", (size,))
    shapes |= {"pre_fc_norm_embedding.weight": (size,), "pre_fc_norm_hidden.weight": (width,)}
    if width == size:
        shapes |= {"norm.weight": (size,), "fc.weight": (size, 2 * size)}
    else:
        shapes |= {"fc_embedding.weight": (size, size), "fc_hidden.weight": (size, size)}
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        gain = next(gain for fragment, gain in _GAINS if fragment in name)
        made[f"mtp.{name}"] = noise * (0.3 if len(shape) == 1 else gain / math.sqrt(shape[-1]))
        if name.endswith("index_qk_proj.weight"):
            made[f"mtp.{name}"] = without_ties(made[f"mtp.{name}"])
    return made


def _is_zero_centred(name: str) -> bool:
    """Whether a norm of a hybrid model multiplies by 1 more than this. Gates halve the streams behind `hc_norm`."""
    is_norm = name.endswith("norm.weight") or ".ple.norm_" in name
    return "language_model" in name and is_norm and not name.endswith(("linear_attn.norm.weight", "hc_norm.weight"))


def _scaled(
    name: str, noise: torch.Tensor, tied: bool, unlikely: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """One parameter from standard normal noise of its shape."""
    if name.endswith("A_log"):
        return torch.linspace(0.05, 1, len(noise)).log()
    if name.endswith("dt_bias"):
        return torch.linspace(-3, 0, len(noise))
    if name.endswith("conv1d.weight"):
        return noise * 0.3 + torch.tensor([0, 0, 0, 0.7])
    if name.endswith("patch_embed.proj.weight"):
        # flat colours count as much as texture
        flat = torch.randn((*noise.shape[:2], 1, 1, 1), generator=generator)
        return (noise + flat) / math.sqrt(noise[0].numel())
    if name.endswith("pos_embed.weight"):
        return noise * 0.4
    if name.endswith("embed_tokens.weight"):
        value = noise * _EMBED_STD
        if tied:
            value[unlikely] *= 0.3
        return value
    if name == "lm_head.weight":
        value = noise * (_LOGIT_STD / math.sqrt(noise.shape[1]))
        value[unlikely] *= 0.1
        return value
    if name.endswith("language_model.norm.weight"):
        gain = _LOGIT_STD / (_EMBED_STD * math.sqrt(noise.shape[0])) if tied else 1.0
        return gain * (1 + 0.1 * noise)
    if noise.ndim == 1:
        is_norm = any(part.endswith("norm") or part.startswith(("norm", "ln_q")) for part in name.split("."))
        return (1.0 if is_norm and name.endswith("weight") else 0.0) + 0.1 * noise
    gain = next(gain for fragment, gain in _GAINS if fragment in name)
    value = noise * (gain / math.sqrt(noise.shape[-1]))
    return without_ties(value) if name.endswith("index_qk_proj.weight") else value


def without_ties(index_qk_proj: torch.Tensor) -> torch.Tensor:
    """Make index heads nearly opposite in pairs. So hardly a score is exactly zero, and no block is chosen by how ties
    are broken."""
    heads = index_qk_proj.unflatten(0, (5, -1)).clone()
    heads[1], heads[3] = 0.3 * heads[1] - heads[0], 0.3 * heads[3] - heads[2]
    return heads.flatten(0, 1)


def _unlikely_tokens(tokenizer: Tokenizer) -> torch.Tensor:
    """Ids that are special, unused, or not printable ASCII."""

    def printable(token_id: int) -> bool:
        text = tokenizer.decode([token_id])
        return bool(text) and text.isascii() and text.isprintable()

    return torch.tensor([i for i in range(VOCAB_SIZE) if i >= BPE_SIZE or not printable(i)])


def _store_experts(tensors: dict[str, torch.Tensor], layout: ExpertLayout) -> dict[str, torch.Tensor]:
    """From `outputs_first`, as transformers has them."""
    stored: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if not prefix.endswith("mlp.experts") or layout == "outputs_first":
            stored[name] = value
        elif layout == "inputs_first":
            stored[name] = value.transpose(1, 2)
        else:
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            for expert, weight in enumerate(value):
                pieces = zip(parts, weight.chunk(len(parts)), strict=True)
                stored |= {f"{prefix}.{expert}.{part}.weight": piece for part, piece in pieces}
    return stored


def _cut_tables(tensors: dict[str, torch.Tensor], parts: int) -> dict[str, torch.Tensor]:
    """Store tables of n-grams as published ones are: `shard_0` and so on."""
    stored: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if prefix.endswith("ngram_embedding"):
            stored |= {f"{prefix}.shard_{number}.{leaf}": part for number, part in enumerate(value.chunk(parts))}
        else:
            stored[name] = value
    return stored


def _flat_name(name: str) -> str:
    """The names that published Qwen2-VL and Qwen2.5-VL checkpoints have."""
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)
