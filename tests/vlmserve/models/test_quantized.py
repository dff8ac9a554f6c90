"""Quantised models: checkpoints of all formats compute what their dequantised weights do; the rest is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import hf_env  # noqa: F401
from tests.quantized_checkpoints import FORMATS, make_quantized
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.models.dense_attention import assert_close, distance_of, logits_of, reference_logits
from vlmserve.models.registry import load_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.linear import Linear
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import library

KEY = "model.layers.1.self_attn.k_proj."


def kinds(model: VisionLanguageModel) -> set[str]:
    """What the decoder's layers compute with."""
    layers = [layer for layer in model.language_model.modules() if isinstance(layer, Linear)]
    return {"plain" if layer.packed is None else layer.packed.kind for layer in layers}


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantised_checkpoint_computes_what_its_dequantised_weights_do(plain, tmp_path, kernels, form, caplog):
    made, same = make_quantized(plain, tmp_path, form)
    model = load_model(made)
    expected = "int8" if form == "gptq-8" else "int4"
    assert kinds(model) == ({expected} if kernels == "operators" else {"plain"})
    assert ("are dequantised" in caplog.text) is (kernels == "torch")
    assert_close(logits_of(model), reference_logits(same))


@pytest.mark.parametrize("form", ["gptq", "gptq-8"])
def test_groups_in_no_order_are_dequantised(plain, tmp_path, kernels, form, caplog):
    made, same = make_quantized(plain, tmp_path, form, shuffled=True)
    model = load_model(made)
    assert kinds(model) == {"plain"}
    assert "12 of 12 quantised weights are dequantised" in caplog.text
    assert_close(logits_of(model), reference_logits(same))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("some", ["mlp.down_proj", "self_attn.q_proj", "layers.0."])
def test_weights_that_are_not_quantised_stay_as_they_are(plain, tmp_path, some):
    made, same = make_quantized(plain, tmp_path, "awq", some=some)
    assert_close(logits_of(load_model(made)), reference_logits(same))


@pytest.mark.usefixtures("kernels")
def test_a_checkpoint_of_float16_is_computed_in_bfloat16(tmp_path):
    plain = make_checkpoint("qwen3_vl", tmp_path / "plain", dtype="float16")
    made, _ = make_quantized(plain, tmp_path, "awq")
    assert load_model(plain).dtype == torch.float16
    assert load_model(made).dtype == torch.bfloat16
    assert load_model(made, dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported are awq, gptq"),
        ({"version": "gemv"}, "version is 'gemv'; supported: 'gemm'"),
        ({"bits": 3}, "bits is 3; supported: 4"),
        ({"group_size": 12}, "group_size is 12; it must be -1, or a multiple of 8"),
        ({"group_size": 64}, r"qweight|qzeros is \[2, 8\] of torch.int32, not \[1, 8\].*group_size 64"),
        ({"quant_method": "gptq", "bits": 2}, "bits is 2; supported: 4, 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "format is 'int-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups has 0 entries"),
    ],
)
def test_what_cannot_be_read_is_refused(plain, tmp_path, change, message):
    made, _ = make_quantized(plain, tmp_path, "awq")
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] |= change
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(made)
    assert str(made) in str(error.value)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("scales", None, r"k_proj\.scales is missing; qweight, qzeros are there"),
        ("scales", torch.ones(2, 30), r"k_proj\.scales is \[2, 30\] of torch.float32, not \[2, 32\]"),
        ("qzeros", torch.ones(2, 4), r"k_proj\.qzeros is \[2, 4\] of torch.float32, not \[2, 4\] of whole numbers"),
        ("weight", torch.ones(32, 64), "unexpected: model.layers.1.self_attn.k_proj.weight"),
    ],
)
def test_damaged_tensors_are_named(plain, tmp_path, leaf, value, message):
    made, _ = make_quantized(plain, tmp_path, "awq")
    tensors = load_file(made / "model.safetensors")
    if value is None:
        del tensors[KEY + leaf]
    else:
        tensors[KEY + leaf] = value
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load_model(made)


def test_whole_numbers_are_no_weights(plain, tmp_path):
    folder, _ = make_quantized(plain, tmp_path, "awq", some="nothing")
    tensors = load_file(folder / "model.safetensors")
    tensors[KEY + "weight"] = tensors[KEY + "weight"].int()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 of whole numbers: \S+k_proj.weight is of torch.int32"):
        load_model(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_and_the_head_are_rounded_as_asked(tmp_path, tied):
    folder = make_checkpoint("qwen3_vl", tmp_path, tied=tied)
    plain = logits_of(load_model(folder))
    distance = {}
    library.activate("auto", threads=2)
    try:
        for mode in ("int8", "int4"):
            model = load_model(folder)
            model.pack(mode)
            assert kinds(model) == {mode}
            assert model._packed_head is not None
            assert model._packed_head.kind == mode
            assert model.language_model.embed_tokens.weight.dtype == torch.float32
            distance[mode] = distance_of(logits_of(model), plain)
    finally:
        library.activate("off", threads=1)
    assert 0 < distance["int8"] < 3e-3 < distance["int4"] < 0.6
