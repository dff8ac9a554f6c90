"""Stages of a model: what each has of the whole, and that they compute together what it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fp8_checkpoints import make_fp8
from tests.quantized_checkpoints import make_quantized
from tests.tiny_checkpoints import ALL_FAMILIES, make_checkpoint
from tests.vlmserve.models.dense_attention import IDS, POSITIONS, DenseAttention, make_batch
from vlmserve.models.registry import load_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.weights import stored_tensors
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.shard import PipelineStage, Shard
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels import library


def stages_of(folder: Path, size: int) -> list[VisionLanguageModel]:
    return [
        load_model(folder, comm=Communicator(Shard(stage=PipelineStage(rank, size))), with_tower=False)
        for rank in range(size)
    ]


@torch.inference_mode()
def logits_of(stages: list[VisionLanguageModel], levels: int = 0) -> torch.Tensor:
    """levels: of DeepStack's rows, for every other token."""
    x = stages[0].embed_tokens(IDS)
    rows = torch.arange(0, len(IDS), 2)
    deepstack = torch.linspace(-3, 3, levels * len(rows) * x.shape[1]).view(levels, len(rows), -1) if levels else None
    for stage in stages:
        stage.pack()
        batch = make_batch(DenseAttention(), [IDS], [POSITIONS], [0])
        more = {"deepstack_index": rows, "deepstack_embeds": deepstack} if deepstack is not None else {}
        x = stage(x, batch.positions, batch, **more)
        deepstack = deepstack[len(stage.language_model.layers) :] if deepstack is not None else None
    return stages[-1].compute_logits(x)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_stages_have_all_of_the_weights_and_only_their_own(family: str, tmp_path: Path):
    """The embedding of a tied model is in the last stage, too."""
    folder = make_checkpoint(family, tmp_path / "m")
    whole = load_model(folder)
    tensors = {name: one for name, one in stored_tensors(whole) if not name.startswith("visual.")}
    seen = []
    for rank, stage in enumerate(stages_of(folder, 2)):
        own = {name: one for name, one in stored_tensors(stage) if not name.startswith("visual.")}
        assert all(torch.equal(one, tensors[name]) for name, one in own.items())
        assert stage.config.num_layers == stage.config.num_kv_layers == 2 - rank
        seen.append(own.keys())
    assert tensors.keys() == seen[0] | seen[1]
    tied = {"language_model.embed_tokens.weight"} if whole.config.tie_word_embeddings else set()
    assert seen[0] & seen[1] == tied


@pytest.mark.parametrize("operators", ["auto", "off"])
@pytest.mark.parametrize(
    ("form", "size"), [*((form, 3) for form in (*ALL_FAMILIES, "fp8", "awq")), ("qwen3_vl", 2), ("fp8", 2)]
)
def test_stages_compute_what_the_whole_does(form: str, size: int, operators: str, tmp_path: Path):
    library.activate(operators, threads=1)
    folder = make_checkpoint(form if form in ALL_FAMILIES else "qwen2_5_vl", tmp_path / "m")
    if form == "fp8":
        folder, _ = make_fp8(folder, tmp_path / "made", "block", block=(32, 32))
    if form == "awq":
        folder, _ = make_quantized(folder, tmp_path / "made", "awq")
    levels = 2 if form.startswith("qwen3") else 0
    try:
        assert torch.equal(logits_of(stages_of(folder, size), levels), logits_of([load_model(folder)], levels))
    finally:
        library.activate("off", threads=1)


def test_layers_are_shared_out_evenly():
    assert [PipelineStage(rank, 4).layers(94) for rank in range(4)] == [
        range(24),
        range(24, 48),
        range(48, 71),
        range(71, 94),
    ]
    assert [PipelineStage(rank, 3).layers(5) for rank in range(3)] == [range(2), range(2, 4), range(4, 5)]
    with pytest.raises(EngineError, match="--pp-size is 4: num_hidden_layers is 3, too few for so many stages"):
        PipelineStage(0, 4).layers(3)


def test_the_last_stage_has_fewer_layers_for_its_head():
    assert [len(PipelineStage(rank, 2).layers(28, 4.9)) for rank in range(2)] == [16, 12]
    assert [PipelineStage(rank, 3).layers(9, 100.0) for rank in range(3)] == [range(4), range(4, 8), range(8, 9)]
    assert PipelineStage().layers(28, 4.9) == range(28)
