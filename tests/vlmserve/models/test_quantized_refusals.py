"""Quantised checkpoints that cannot be read, or are damaged, are refused by what is wrong with them."""

from __future__ import annotations

import pytest
import torch

from tests.fp8_checkpoints import make_fp8
from tests.quantized_checkpoints import make_quantized
from tests.vlmserve.models.edits import edit_config, edit_weights
from vlmserve.models.registry import load_model
from vlmserve_common.errors import CheckpointError

KEY = "model.layers.1.self_attn.k_proj."
EIGHT_BITS = torch.float8_e4m3fn


def make(plain, folder, form):
    if form == "awq":
        return make_quantized(plain, folder, form)[0]
    return make_fp8(plain, folder, form, block=(32, 32))[0]


def group(part: str, **change):
    """A change of the only group of compressed-tensors."""
    return lambda config: config["config_groups"]["group_0"][part].update(change)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("awq", {"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported are awq, gptq"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; supported: 'gemm'"),
        ("awq", {"bits": 3}, "bits is 3; supported: 4"),
        ("awq", {"group_size": 12}, "group_size is 12; it must be -1, or a multiple of 8"),
        ("awq", {"group_size": 64}, r"qweight|qzeros is \[2, 8\] of torch.int32, not \[1, 8\].*group_size 64"),
        ("awq", {"quant_method": "gptq", "bits": 2}, "bits is 2; supported: 4, 8"),
        ("awq", {"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("awq", {"quant_method": "compressed-tensors", "format": "int-quantized"}, "format is 'int-quantized'"),
        ("awq", {"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups has 0 entries"),
        ("block", {"fmt": "e5m2"}, "fmt is 'e5m2'; supported: 'e4m3'"),
        ("block", {"activation_scheme": "x"}, "activation_scheme is 'x'; supported: 'dynamic', 'static'"),
        ("block", {"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two sizes above 0"),
        ("block", {"weight_block_size": [0, 8]}, r"weight_block_size is \[0, 8\]"),
        ("block", {"weight_block_size": [16, 16]}, r"scale_inv is \[\d, \d\] of torch.float32, not \[\d+, \d+\] of"),
        ("block", {"quant_method": "bitsandbytes"}, "supported are awq, gptq, fp8 and compressed-tensors"),
        ("block", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format is 'nvfp4"),
        ("channel", group("weights", num_bits=4), "num_bits is 4; supported: 8"),
        ("channel", group("weights", strategy="group"), "strategy is 'group'; supported: 'tensor', 'channel', 'block'"),
        ("channel", group("weights", strategy="block"), "block_structure is missing"),
        ("channel", group("input_activations", type="int"), "type is 'int'; supported: 'float'"),
    ],
)
def test_what_cannot_be_read_is_refused(plain, tmp_path, form, change, message):
    made = make(plain, tmp_path, form)
    edit_config(made, change, "quantization_config")
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(made)
    assert str(made) in str(error.value)


@pytest.mark.parametrize(
    ("form", "leaf", "value", "message"),
    [
        ("awq", "scales", None, r"k_proj\.scales is missing; qweight, qzeros are there"),
        ("awq", "scales", torch.ones(2, 30), r"k_proj\.scales is \[2, 30\] of torch.float32, not \[2, 32\]"),
        ("awq", "qzeros", torch.ones(2, 4), r"qzeros is \[2, 4\] of torch.float32, not \[2, 4\] of whole numbers"),
        ("awq", "weight", torch.ones(32, 64), "unexpected: model.layers.1.self_attn.k_proj.weight"),
        ("block", "weight_scale_inv", None, r"1 of 8-bit floats without a scale: \S+k_proj\.weight"),
        ("block", "weight_scale_inv", torch.ones(3, 5), r"scale_inv is \[3, 5\] of torch.float32, not \[1, 2\]"),
        ("block", "weight_scale_inv", torch.ones(1, 2).int(), r"k_proj\.weight_scale_inv is \[1, 2\] of torch.int32"),
        ("block", "weight", torch.ones(32, 64), r"1 unexpected: \S+k_proj\.weight_scale_inv"),
        (
            "block",
            "weight",
            torch.ones(31, 64).to(EIGHT_BITS),
            r"1 of the wrong shape: \S+k_proj\.weight is \[31, 64\]",
        ),
    ],
)
def test_damaged_tensors_are_named(plain, tmp_path, form, leaf, value, message):
    made = make(plain, tmp_path, form)
    edit_weights(
        made, lambda tensors: tensors.pop(KEY + leaf) if value is None else tensors.update({KEY + leaf: value})
    )
    with pytest.raises(CheckpointError, match=message):
        load_model(made)


def test_whole_numbers_are_no_weights(plain, tmp_path):
    made, _ = make_quantized(plain, tmp_path, "awq", some="nothing")
    edit_weights(made, lambda tensors: tensors.update({KEY + "weight": tensors[KEY + "weight"].int()}))
    with pytest.raises(CheckpointError, match=r"1 of whole numbers: \S+k_proj.weight is of torch.int32"):
        load_model(made)
