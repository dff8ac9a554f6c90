"""The figures of docs/memory.md follow from its dimensions by its formulas, and from the code where that decides."""

from __future__ import annotations

import re

import pytest
import torch

from tests import hf_env  # noqa: F401

# isort: split
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from processors.resize import smart_resize
from tests.vlmserve.server_process import ROOT
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.kv_cache import KVCache
from vlmserve.models.config import read_model_config
from vlmserve.models.qwen import QWEN3_MOE_DEFAULTS, Qwen3Decoder
from vlmserve.models.qwen3_5 import QWEN3_5_DEFAULTS, QWEN3_5_MOE_DEFAULTS, Qwen3_5Decoder

PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
GIB = 2**30
VOCABULARY = {"Qwen2-VL-2B": 151936, "Qwen2.5-VL-3B": 151936, "Qwen2": 152064, "Qwen3": 151936}


def _table(heading: str, number: int = 0) -> dict[str, list[str]]:
    """The rows of a table under a heading, by their first cell."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = [part.strip() for part in section.split("\n\n") if part.strip().startswith("|")][number]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


EXPERTS = {name: list(map(int, row)) for name, row in _table("Experts", 1).items()}
DIMENSIONS = {name: [*map(int, row[:9]), row[9] == "yes"] for name, row in _table("Dimensions").items()}


def _decoder(name: str) -> int:
    layers, d, f, heads, kv_heads, head_dim, *_, tied = DIMENSIONS[name]
    vocabulary = next(size for start, size in VOCABULARY.items() if name.startswith(start))
    attention = 2 * d * heads * head_dim + 2 * d * kv_heads * head_dim
    attention += 2 * head_dim if name.startswith("Qwen3") else (heads + 2 * kv_heads) * head_dim
    return layers * (attention + 3 * d * f + 2 * d) + d + vocabulary * d * (1 if tied else 2)


def _tower(name: str) -> int:
    d, (layers, e, f) = DIMENSIONS[name][1], DIMENSIONS[name][6:9]
    attention = 4 * e * e + 4 * e
    merger = (4 * e) ** 2 + 4 * e + 4 * e * d + d
    if name.startswith("Qwen2-"):
        return 3 * 2 * 14**2 * e + layers * (attention + 2 * e * f + f + e + 4 * e) + merger + 2 * e
    if name.startswith("Qwen2.5"):
        return 3 * 2 * 14**2 * e + layers * (attention + 3 * e * f + 2 * f + e + 2 * e) + merger + e
    patches = 3 * 2 * 16**2 * e + e + 2304 * e
    return patches + layers * (attention + 2 * e * f + f + e + 4 * e) + 4 * merger + 2 * e + 3 * 2 * 4 * e


def _kv_bytes(name: str) -> int:
    layers, _, _, _, kv_heads, head_dim = DIMENSIONS[name][:6]
    return KVCache.bytes_per_token(layers, kv_heads, head_dim, torch.bfloat16)


def test_the_formulas_count_what_the_published_checkpoints_hold() -> None:
    published = {"Qwen2-VL-2B": 2208985600, "Qwen2.5-VL-7B": 8292166656, "Qwen3-VL-8B": 8767123696}
    assert {name: _decoder(name) + _tower(name) for name in published} == published


@pytest.mark.parametrize("name", DIMENSIONS)
def test_sizes(name: str) -> None:
    parameters, tower = _decoder(name) + _tower(name), _tower(name)
    wide = 4 if name.startswith("Qwen3") else 1
    assert _table("Sizes")[name] == [
        f"{parameters / 1e9:.2f}",
        f"{tower / 1e9:.2f}",
        f"{parameters * 2 / GIB:.1f}",
        f"{parameters * 4 / GIB:.1f}",
        f"{_kv_bytes(name) // 1024}",
        f"{_kv_bytes(name) * 32768 / GIB:.1f}",
        f"{DIMENSIONS[name][1] * wide * 2 / 1024:g}",
    ]


@pytest.mark.parametrize("name", DIMENSIONS)
def test_what_fits(name: str) -> None:
    part = EngineArgs(model="").mem_fraction_static
    weights = (_decoder(name) + _tower(name)) * 2
    tokens = [int((part * size * GIB - weights) / _kv_bytes(name)) for size in (8, 16, 24, 32, 80, 141)]
    assert _table("What fits")[name] == [f"{one // 1000}" if one >= 4000 else "-" for one in tokens]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str) -> None:
    layers, d, heads, kv_heads, head_dim, experts, chosen, inner = EXPERTS[name]
    hf_config = {
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "num_hidden_layers": layers,
            "hidden_size": d,
            "intermediate_size": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "num_experts": experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": inner,
        },
    }
    config = read_model_config(hf_config, {}, QWEN3_MOE_DEFAULTS)
    with torch.device("meta"):
        model = Qwen3Decoder(config, torch.bfloat16)
    decoder, head = sum(parameter.numel() for parameter in model.parameters()), 151936 * d
    unused = layers * 3 * (experts - chosen) * d * inner
    tower = _tower("Qwen3-VL-8B") - 4 * (4 * 1152 + 1) * (4096 - d)
    total, kv = decoder + head + tower, KVCache.bytes_per_token(layers, kv_heads, head_dim, torch.bfloat16)
    part = EngineArgs(model="").mem_fraction_static
    tokens = [int((part * size * GIB - 2 * total) / kv) for size in (80, 141)]
    assert _table("Experts")[name] == [
        f"{total / 1e9:.2f}",
        f"{(decoder - unused) / 1e9:.2f}",
        f"{total * 2 / GIB:.1f}",
        f"{kv // 1024}",
        f"{4 * d * 2 / 1024:g}",
        *(f"{one // 1000}" if one >= 4000 else "-" for one in tokens),
    ]


@pytest.mark.parametrize("name", ["Qwen3.5-9B", "Qwen3.5-35B-A3B"])
def test_hybrid_models(name: str) -> None:
    sparse = name.endswith("A3B")
    text = (Qwen3_5MoeTextConfig if sparse else Qwen3_5TextConfig)().to_dict()
    defaults = QWEN3_5_MOE_DEFAULTS if sparse else QWEN3_5_DEFAULTS
    config = read_model_config({"model_type": "qwen3_5", "text_config": text}, {}, defaults)
    with torch.device("meta"):
        model = Qwen3_5Decoder(config, torch.bfloat16)
    total = sum(parameter.numel() for parameter in model.parameters()) + config.vocab_size * config.hidden_size
    state = state_shape(config, torch.bfloat16).nbytes
    kv = KVCache.bytes_per_token(config.num_kv_layers, config.num_kv_heads, config.head_dim, torch.bfloat16)
    assert _table("Hybrid models")[name] == [
        f"{total / 1e9:.2f}",
        f"{total * 2 / GIB:.1f}",
        f"{kv // 1024}",
        f"{state / 2**20:.1f}",
        f"{EngineArgs(model='').max_running_requests * state / GIB:.1f}",
        f"{EngineArgs(model='').mamba_cache_mib * 2**20 // state}",
    ]


def test_tokens_of_pictures() -> None:
    rows = _table("Tokens of pictures and videos")
    assert len(rows) > 5
    for size, cells in rows.items():
        width, height = map(int, re.findall(r"\d+", size)[:2])
        found = []
        for factor, low, high in ((28, 56 * 56, 12845056), (32, 65536, 16777216)):
            tall, wide = smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
            found += [f"{wide} x {tall}", f"{tall // factor * (wide // factor)}"]
        assert cells == found
