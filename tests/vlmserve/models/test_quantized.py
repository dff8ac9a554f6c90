"""Quantised models: checkpoints of all formats compute what their dequantised weights do; the rest is refused."""

from __future__ import annotations

import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.quantized_checkpoints import FORMATS, make_quantized
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.models.dense_attention import assert_close, distance_of, logits_of, reference_logits
from vlmserve.models.registry import load_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.linear import Linear
from vlmserve_common.kernels import library


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
