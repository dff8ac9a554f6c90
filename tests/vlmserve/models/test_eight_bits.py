"""`--quantization w8a8`: activations of 8 bits in decoder and tower; where they cannot be, int8 or an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.models.dense_attention import distance_of, logits_of
from tests.vlmserve.models.test_quantized import kinds
from vision.towers.loading import load_tower
from vlmserve import LLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.model_loading import load
from vlmserve.models.registry import load_model
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.linear import Linear, pack_linears
from vlmserve_common.compute.shard import Shard
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels import library
from vlmserve_common.kernels.quantized import tower_mode

SAMPLES = Path("assets/samples")
CPU = torch.device("cpu")


@pytest.fixture
def _bytes():
    library.activate("auto", threads=2)
    if not library.multiplies_bytes():
        pytest.skip("this CPU does not multiply bytes")
    yield
    library.activate("off", threads=1)


@pytest.mark.usefixtures("_bytes")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_the_decoder_is_rounded_and_the_head_as_for_int8(tmp_path, family):
    folder = make_checkpoint(family, tmp_path)
    library.activate("off", threads=1)
    plain = logits_of(load_model(folder))
    library.activate("auto", threads=2)
    model = load_model(folder)
    model.pack("w8a8")
    assert kinds(model) <= {"w8a8", "float32"}
    assert "w8a8" in kinds(model)
    assert model._packed_head is not None
    assert model._packed_head.kind == "int8"
    assert 0 < distance_of(logits_of(model), plain) < 0.02


@pytest.mark.usefixtures("_bytes")
def test_a_tower_is_near_the_plain_one_and_depends_on_no_batch(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path)
    plain, tower = load_tower(folder), load_tower(folder)
    width = plain.patch_embed.proj.weight.shape[1]
    pack_linears(tower, tower_mode("w8a8", CPU))
    assert {layer.packed.kind for layer in tower.modules() if isinstance(layer, Linear) and layer.packed} == {"w8a8"}
    assert tower_mode("int8", CPU) is None
    pixels = torch.randn(3 * 64, width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole, truth = tower(pixels, [(3, 8, 8)]), plain(pixels, [(3, 8, 8)])
        assert torch.equal(tower(pixels[:64], [(1, 8, 8)]), whole[: len(whole) // 3])
    assert 0 < (whole - truth).norm() / truth.norm() < 0.05


@pytest.mark.usefixtures("_bytes")
def test_the_built_in_model_answers_as_ever():
    samples = [sample for sample in json.loads((SAMPLES / "samples.json").read_text()) if len(sample["media"]) == 1]
    asked = [sample for sample in samples if sample["answered"] and not sample["media"][0].endswith(".mp4")][:8]
    with LLM(quantization="w8a8", num_threads=2, max_total_tokens=4096) as llm:
        answers = [
            llm.chat(sample["question"], images=str(SAMPLES / sample["media"][0]), max_tokens=64, temperature=0).text
            for sample in asked
        ]
    assert sum(answer == sample["answer"] for answer, sample in zip(answers, asked, strict=True)) >= len(asked) - 1


def test_a_cpu_without_such_products_computes_as_int8(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("vlmserve.engine.model_loading.multiplies_bytes", lambda: False)
    monkeypatch.setattr("vlmserve_common.kernels.quantized.multiplies_bytes", lambda: False)
    library.activate("auto", threads=1)
    args = EngineArgs(model=str(make_checkpoint("qwen2_vl", tmp_path)), quantization="w8a8")
    try:
        model = load(args, CPU, Communicator(Shard()), 1, with_tower=True)
        assert kinds(model) == {"int8"}
        assert tower_mode("w8a8", CPU) is None
    finally:
        library.activate("off", threads=1)
    assert "--quantization w8a8 computes as int8 here" in caplog.text


def test_a_gpu_refuses_it(tmp_path):
    args = EngineArgs(model=str(tmp_path), quantization="w8a8")
    with pytest.raises(EngineError, match="--quantization w8a8 is for CPUs, and the model is on cuda:0"):
        load(args, torch.device("cuda:0"), Communicator(Shard()), 1, with_tower=True)
