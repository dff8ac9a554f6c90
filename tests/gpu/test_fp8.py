"""Checkpoints of 8-bit floats: products against those of dequantised weights, and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fp8_checkpoints import make_fp8
from tests.gpu.test_answers import engine, first_logits
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from tests.vlmserve_common.kernels.paged_step import off
from vlmserve_common.compute.fp8 import FP8, GROUP, Fp8Scales, dequantize_

FORMS = ("block", "tensor", "channel", "tensor-static", "compressed-block")
TOLERANCE = 0.1
"""Of logits: inputs of each product are rounded to 8 bits, about one part in 16 at the worst."""


@pytest.mark.parametrize("inputs", ["group", "token", "static"])
def test_products_are_those_of_dequantised_weights(device, inputs):
    """Twice: beside the same rounding by plain torch, and beside no rounding of the inputs."""
    shapes = [(1, 4096, 6144), (17, 4096, 4096), (512, 12288, 4096)] if device.type == "cuda" else [(3, 256, 384)]
    for tokens, inner, outer in shapes:
        rows, columns = (GROUP, GROUP) if inputs == "group" else (1, inner)
        generator = torch.Generator().manual_seed(outer)
        weight = torch.randn(outer, inner, generator=generator) / inner**0.5
        scales = Fp8Scales((outer, inner), rows, columns, inputs, torch.bfloat16)
        spread = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3)) / 448
        scales.weights.copy_(spread)
        if scales.input is not None:
            scales.input.fill_(0.02)
        wide = spread.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        numbers = (weight / wide).to(FP8)
        x, bias = torch.randn(tokens, inner, generator=generator).bfloat16(), torch.randn(outer, generator=generator)
        with torch.inference_mode():
            emulated = scales(x, numbers, bias.bfloat16())
            exact = x.float() @ dequantize_(numbers.float(), spread, rows, columns).t() + bias
            found = scales.to(device)(x.to(device), numbers.to(device), bias.bfloat16().to(device)).cpu()
        assert off(found, emulated) < 1e-2, (inputs, tokens)
        assert off(found, exact) < 5e-2, (inputs, tokens)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_dequantised_weights(plain, device, tmp_path, monkeypatch, form):
    quantised, same = make_fp8(plain, tmp_path, form)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    with (
        engine(quantised, device, dtype=dtype) as llm,
        engine(same, torch.device("cpu"), dtype="float32") as truth,
    ):
        for conversation in conversations()[:4]:
            found, wanted = (first_logits(one, conversation, monkeypatch) for one in (llm, truth))
            assert off(found, wanted) < TOLERANCE


@pytest.mark.parametrize("setting", ["fp8_e4m3", "int8"])
def test_a_cache_of_eight_bits(plain, device, monkeypatch, setting):
    with (
        engine(plain, device, dtype="bfloat16", kv_cache_dtype=setting) as llm,
        engine(plain, torch.device("cpu"), dtype="float32") as truth,
    ):
        for conversation in conversations()[:4]:
            found, wanted = (first_logits(one, conversation, monkeypatch) for one in (llm, truth))
            assert off(found, wanted) < TOLERANCE
