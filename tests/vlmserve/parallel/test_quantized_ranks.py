"""Checkpoints of fewer bits: processes that share one answer as one process that has all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fp8_checkpoints import make_fp8
from tests.quantized_checkpoints import make_quantized
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.models.test_fp8_experts import make_fp8_experts
from tests.vlmserve.parallel.test_tensor_parallel import GREEDY, SETTINGS, assert_alike
from tests.vlmserve.reference import conversations
from vlmserve import LLM

TP, PP, EP = {"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "ep_size": 2}


def made(form: str, base: Path) -> Path:
    if form == "fp8 experts":
        return make_fp8_experts(base, "each")[0]
    plain = make_checkpoint("qwen2_5_vl", base / "plain")
    if form == "fp8":
        return make_fp8(plain, base, "block", block=(8, 8))[0]
    return make_quantized(plain, base, form)[0]


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ("awq", TP),
        ("fp8 experts", EP | {"moe_a2a_backend": "torch"}),
        pytest.param("fp8 experts", TP, marks=pytest.mark.slow),
        pytest.param("fp8", TP, marks=pytest.mark.slow),
        pytest.param("gptq", TP, marks=pytest.mark.slow),
        pytest.param("compressed-tensors", TP, marks=pytest.mark.slow),
        pytest.param("fp8", TP | PP, marks=pytest.mark.slow),
        pytest.param("awq", TP | PP, marks=pytest.mark.slow),
        pytest.param("fp8 experts", EP | PP, marks=pytest.mark.slow),
    ],
)
def test_the_same_answers_as_alone(form: str, sizes: dict[str, int | str], tmp_path: Path):
    folder = made(form, tmp_path)
    answers = []
    for how in ({}, sizes):
        with LLM(str(folder), dtype="float32", **SETTINGS, **how) as llm:
            answers.append(llm.chat_batch(conversations(), GREEDY, num_logprobs=2))
    assert_alike(*answers)
