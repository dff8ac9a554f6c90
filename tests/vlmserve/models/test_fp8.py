"""Checkpoints of 8-bit floats compute what their dequantised weights do, but for inputs that are rounded; the rest is
refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests import hf_env  # noqa: F401
from tests.fp8_checkpoints import FORMS, make_fp8
from tests.tiny_checkpoints import FAMILIES, HYBRID, make_checkpoint
from tests.vlmserve.models.dense_attention import assert_close, distance_of, logits_of, reference_logits
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.registry import load_model, outline_model
from vlmserve.models.vlm import WEIGHT_RULES, VisionLanguageModel
from vlmserve_common.checkpoint.weights import stored_tensors
from vlmserve_common.compute.fp8 import Fp8Scales, scaled_product
from vlmserve_common.compute.linear import Linear

ODD = (24, 40)  # of which no size of the tiny models is a multiple


def kept(model: VisionLanguageModel) -> int:
    """How many layers of the decoder have weights of 8-bit floats."""
    layers = [layer for layer in model.language_model.modules() if isinstance(layer, Linear)]
    assert all((layer.fp8 is None) is (layer.weight.dtype != torch.float8_e4m3fn) for layer in layers)
    return sum(layer.fp8 is not None for layer in layers)


@pytest.mark.parametrize("form", FORMS)
def test_on_a_cpu_weights_are_dequantised(plain, tmp_path, form, caplog):
    made, same = make_fp8(plain, tmp_path, form)
    model = load_model(made)
    assert kept(model) == 0
    assert "12 of 12 weights of 8-bit floats are dequantised" in caplog.text
    assert_close(logits_of(model), reference_logits(same))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_blocks_of_odd_sizes_and_shards(tmp_path, family):
    plain = make_checkpoint(family, tmp_path / "plain", tied=False)
    made, same = make_fp8(plain, tmp_path, "block", block=ODD, shards=3)
    reference = reference_logits(same)
    assert_close(logits_of(load_model(made)), reference)
    distance = distance_of(logits_of(load_model(made, keep_fp8=True)), reference)
    assert 0 < distance < 0.05


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_types(plain, tmp_path, scale_dtype):
    made, same = make_fp8(plain, tmp_path, "block", block=(32, 32), scale_dtype=scale_dtype)
    assert_close(logits_of(load_model(made)), reference_logits(same))


def test_transformers_takes_the_numbers_to_mean_the_same(plain, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made, _ = make_fp8(plain, tmp_path, "block", block=(32, 32))
    tensors, loaded = load_file(made / "model.safetensors"), dict(stored_tensors(load_model(made)))
    names = [name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn]
    assert len(names) == 3 * 7
    for name in names:
        pair = {"weight": tensors[name], "weight_scale_inv": tensors[f"{name}_scale_inv"]}
        theirs = Fp8Dequantize(None).convert(pair)["weight"]
        assert torch.equal(loaded[WEIGHT_RULES.our_name(name)], theirs), name


@pytest.mark.parametrize("form", [form for form in FORMS if form != "weights-only"])
def test_weights_that_stay_8_bit_floats_round_their_inputs_and_nothing_else(plain, tmp_path, form, request):
    made, same = make_fp8(plain, tmp_path, form)
    model = load_model(made, keep_fp8=True)
    assert kept(model) == 12
    reference = reference_logits(same)
    distance = distance_of(logits_of(model), reference)
    assert 0 < distance < 0.05
    request.getfixturevalue("exact_inputs")
    assert_close(logits_of(model), reference)


@pytest.mark.parametrize(
    ("form", "dtype"), [("block", torch.float32), ("channel", torch.bfloat16), ("static", torch.bfloat16)]
)
def test_what_a_gpu_multiplies_by_computes_the_same(plain, tmp_path, form, dtype, monkeypatch):
    """Under Triton's interpreter. Of blocks of odd sizes, parts are joined by giving each output a scale."""
    from vlmserve_common.kernels.gpu import fp8 as kernels

    made, _ = make_fp8(plain, tmp_path, form, block=(24, 128))
    model = load_model(made, dtype=dtype, keep_fp8=True)
    emulated = logits_of(model)

    def forward(scales: Fp8Scales, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if scales.inputs == "group":
            return kernels.block_linear(x, weight, scales.weights, bias, rows=scales.rows)
        numbers, own = kernels.quantize(x, x.shape[1], scales.input)
        return scaled_product(numbers, own, weight, scales.weights, bias, x.dtype)

    monkeypatch.setattr(Fp8Scales, "emulated", forward)
    assert distance_of(logits_of(model), emulated) < (1e-4 if dtype == torch.float32 else 5e-3)


def test_weights_only_and_parts_of_layers_are_dequantised(plain, tmp_path, caplog):
    made, same = make_fp8(plain, tmp_path / "1", "weights-only")
    model = load_model(made, keep_fp8=True)
    assert kept(model) == 0
    assert_close(logits_of(model), reference_logits(same))
    made, same = make_fp8(plain, tmp_path / "2", "block", some="self_attn.q_proj")
    model = load_model(made, keep_fp8=True)
    assert kept(model) == 0
    assert "3 of 3 weights" in caplog.text
    assert_close(logits_of(model), reference_logits(same))


def test_sizes_count_a_byte_for_weights_that_are_kept(plain, tmp_path, monkeypatch):
    made, _ = make_fp8(plain, tmp_path, "block", block=(32, 32))
    monkeypatch.setattr("vlmserve_common.checkpoint.fp8.can_multiply", lambda *_: True)
    outline = outline_model(made, torch.bfloat16, "meta")
    whole, layer = outline_model(plain, torch.bfloat16, "meta"), outline.language_model.layers[0]
    linears = [part for part in layer.modules() if isinstance(part, Linear)]
    numbers = sum(part.weight.numel() for part in linears)
    scales = sum(part.fp8.weights.nbytes for part in linears)
    assert numbers > 10 * scales > 0
    assert weight_bytes(whole) - weight_bytes(outline) == len(outline.language_model.layers) * (numbers - scales)
    assert weight_bytes(outline) == weight_bytes(load_model(made, dtype=torch.bfloat16))


def test_dequantised_weights_are_rounded_once(plain, tmp_path):
    made, same = make_fp8(plain, tmp_path, "block", block=ODD)
    ours, truth = load_model(made, dtype=torch.bfloat16).state_dict(), load_model(same).state_dict()
    for name, value in ours.items():
        assert torch.equal(value, truth[name].bfloat16()), name


@pytest.mark.parametrize("form", ["block", "channel"])
def test_the_head_that_guesses(tmp_path, form):
    made, same = make_fp8(make_checkpoint(HYBRID, tmp_path / "plain", mtp=True), tmp_path, form, block=(32, 32))
    ours, truth = (dict(load_model(folder, mtp=True).mtp.named_parameters()) for folder in (made, same))
    assert len(ours) == 12
    for name, parameter in ours.items():
        assert_close(parameter, truth[name])
    kept_as_they_are = load_model(made, mtp=True, keep_fp8=True).mtp
    assert [name for name, layer in kept_as_they_are.named_modules() if getattr(layer, "fp8", None)] == [
        f"layers.0.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]
