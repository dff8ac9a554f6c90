"""Checkpoints of whole numbers of 4 and 8 bits: products beside those of dequantised weights, and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_answers import TOLERANCE, engine
from tests.quantized_checkpoints import make_quantized
from tests.tiny_checkpoints import MOE, make_checkpoint
from tests.vlmserve.models.test_expert_parts import experts_of
from tests.vlmserve.models.test_quantized_experts import SIZES
from tests.vlmserve.reference import Reference, assert_equal_answers, conversations
from tests.vlmserve_common.kernels.paged_step import off
from tests.vlmserve_common.kernels.test_triton_int_linear import filled, form_of
from vlmserve import SamplingOverrides
from vlmserve_common.kernels import fused

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_dequantised_weights(device, bits):
    shapes = [(1, 4096, 6144), (17, 4096, 4096), (512, 12288, 4096)] if device.type == "cuda" else [(3, 256, 384)]
    fused.activate("triton", device)
    for tokens, inner, outer in shapes:
        weights = filled(form_of(outer, inner, bits, 128, torch.bfloat16)).to(device)
        x = torch.randn(tokens, inner, generator=torch.Generator().manual_seed(outer)).bfloat16().to(device)
        with torch.inference_mode():
            exact = x.float() @ weights.dequantized(0, torch.float32).t()
            assert off(weights.product(x).cpu(), exact.cpu()) < 1e-2, (tokens, bits)


@pytest.mark.parametrize("form", ["awq", "gptq-8"])
@pytest.mark.parametrize("family", ["qwen3_vl", MOE])
def test_answers_are_those_of_transformers(family, form, device, tmp_path: Path):
    """One at a time and together; on a GPU by captured steps."""
    made, same = make_quantized(make_checkpoint(family, tmp_path / "plain", sizes=SIZES), tmp_path, form)
    asked, reference = conversations()[:4], Reference(same)
    wanted = [reference.answer(messages, 12) for messages in asked]
    with engine(made, device, dtype="float32") as llm:
        for experts in experts_of(llm._runner.model):
            assert (experts.ints is not None) if device.type == "cuda" else (experts.packed is not None)
        for count in (1, len(asked)):
            for got, want in zip(llm.chat_batch(asked[:count], GREEDY, num_logprobs=1), wanted, strict=False):
                assert_equal_answers(got, want, TOLERANCE)
