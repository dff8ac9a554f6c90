"""Scales of the KV cache in a checkpoint: they change no answer of an exact cache, and bring keys into the range of
8-bit floats."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fp8_checkpoints import make_fp8
from tests.quantized_checkpoints import make_quantized
from tests.tiny_checkpoints import FAMILIES, make_checkpoint, write_safetensors
from tests.vlmserve.models.dense_attention import IDS, POSITIONS, DenseAttention, make_batch
from vlmserve.memory.kv_cache import KVCache
from vlmserve.models.registry import load_model, outline_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import library

NAMES = ("self_attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.{}_proj.output_scale")


def with_scales(plain: Path, folder: Path, scales: dict[str, float], name: str = NAMES[0]) -> Path:
    """A copy of a checkpoint whose last layer has these scales ("k", "v"), and its keys and values in their range."""
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    prefix = next(key for key in tensors if "layers.1.self_attn.q_proj" in key).partition("self_attn")[0]
    for kind, scale in scales.items():
        tensors[prefix + name.replace("{}", kind)] = torch.tensor(scale).reshape(1)
    write_safetensors(folder, tensors)
    return folder


@torch.inference_mode()
def computed(model: VisionLanguageModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits; keys and values of layer 1."""
    attention = DenseAttention()
    batch = make_batch(attention, [IDS], [POSITIONS], [0])
    logits = model.compute_logits(model(model.embed_tokens(IDS), batch.positions, batch))
    return logits, *attention.kv[1, 0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_to_the_bit_and_keys_and_values_are_divided(tmp_path, family, name):
    plain = make_checkpoint(family, tmp_path / "plain")
    logits, keys, values = computed(load_model(plain))
    scaled = with_scales(plain, tmp_path / "scaled", {"k": 3.7, "v": 0.01}, name)
    outline_model(scaled)  # accounts for them
    made, made_keys, made_values = computed(load_model(scaled))
    assert torch.equal(made, logits)
    assert torch.equal(made_keys, keys / 4)
    assert torch.equal(made_values, values * 64)


@pytest.mark.parametrize("form", ["block", "channel"])
def test_weights_of_8_bit_floats_take_them_into_their_own(tmp_path, form):
    plain = make_checkpoint("qwen2_5_vl", tmp_path / "plain")
    made, _ = make_fp8(plain, tmp_path, form, block=(24, 40))
    logits, keys, values = computed(load_model(made, keep_fp8=True))
    scaled = with_scales(made, tmp_path / "scaled", {"k": 0.4, "v": 30.0})
    for keep in (True, False):
        expected = logits if keep else computed(load_model(made))[0]
        assert torch.equal(computed(load_model(scaled, keep_fp8=keep))[0], expected)
    _, made_keys, made_values = computed(load_model(scaled, keep_fp8=True))
    assert torch.equal(made_keys, keys * 2)
    assert torch.equal(made_values, values / 32)


def test_large_keys_fit_into_a_cache_of_8_bit_floats(tmp_path):
    """Of 448 at the most, which these exceed without their scale."""
    plain = make_checkpoint("qwen3_vl", tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    name = next(key for key in tensors if "layers.1.self_attn.k_norm" in key)
    tensors[name] *= 2000
    write_safetensors(plain, tensors)
    scaled = with_scales(plain, tmp_path / "scaled", {"k": 16.0})
    error = {}
    for folder, factor in ((plain, 1.0), (scaled, 16.0)):
        keys = computed(load_model(folder))[1]
        cache = KVCache(
            num_slots=len(keys),
            num_layers=1,
            num_kv_heads=keys.shape[1],
            head_dim=keys.shape[2],
            dtype=torch.float8_e4m3fn,
            device=torch.device("cpu"),
        )
        stored, _ = cache.write(0, torch.arange(len(keys)), keys, keys)
        truth = keys * factor
        assert truth.abs().max() > 448
        error[folder] = ((stored * factor - truth).norm() / truth.norm()).item()
    assert error[scaled] < 0.05 < 0.2 < error[plain]


def test_packed_weights_leave_them_out_and_say_so(tmp_path, caplog):
    plain = make_checkpoint("qwen2_5_vl", tmp_path / "plain")
    made, _ = make_quantized(plain, tmp_path, "awq")
    scaled = with_scales(made, tmp_path / "scaled", {"k": 0.5, "v": 0.5})
    library.activate("auto", threads=1)
    try:
        expected, model = load_model(made), load_model(scaled)
    finally:
        library.activate("off", threads=1)
    assert expected.language_model.layers[0].self_attn.qkv_proj.packed is not None
    assert caplog.text.count("is not used: the weights that it belongs to are whole numbers") == 2
    assert torch.equal(
        model.language_model.layers[1].self_attn.qkv_proj.packed.data,
        expected.language_model.layers[1].self_attn.qkv_proj.packed.data,
    )


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_none_are_refused(tmp_path, scale):
    plain = make_checkpoint("qwen3_vl", tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"k_scale is \S+; it must be above 0"):
        load_model(with_scales(plain, tmp_path / "scaled", {"k": scale}))
