"""Weights that are written in the place of others: as if the model had been loaded with them, at the same addresses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.omni_checkpoints import FAMILIES as OMNI_FAMILIES
from tests.omni_checkpoints import make_omni_checkpoint
from tests.tiny_checkpoints import ALL_FAMILIES, HYBRID_MOE, HYBRIDS, MOE, STREAMED, make_checkpoint, write_safetensors
from vlmserve.models.registry import WeightUpdates, load_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint import reader
from vlmserve_common.checkpoint.reader import CheckpointReader, GivenTensors
from vlmserve_common.checkpoint.rewrite import Rewriter
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.linear import Linear, pack_linears
from vlmserve_common.compute.shard import ExpertSharing, Shard
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import library
from vlmserve_common.kernels.packed_linear import PackedWeight

WHOLE = Shard(0, 1)


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    library.activate("auto", threads=1)
    yield
    library.activate("off", threads=1)


def packed(folder: Path, mode=None, shard: Shard = WHOLE, dtype=None) -> VisionLanguageModel:
    model = load_model(folder, dtype=dtype, comm=Communicator(shard))
    model.pack(mode)
    pack_linears(model.visual, mode)
    return model


def memory(model: VisionLanguageModel) -> dict[str, torch.Tensor]:
    """Everything that the model computes with."""
    found: dict[str, torch.Tensor] = {name: one.detach() for name, one in model.named_parameters()}
    for name, child in model.named_modules():
        weights = child.packed if isinstance(child, Linear | Experts) else getattr(child, "_packed_head", None)
        for number, one in enumerate(weights if isinstance(weights, tuple) else (weights,)):
            if isinstance(one, PackedWeight):
                found[f"{name} packed {number}"] = one.data
                if one.bias is not None:
                    found[f"{name} bias"] = one.bias
    return {name: one.view(-1).view(torch.uint8) for name, one in found.items()}


def differing(one: VisionLanguageModel, other: VisionLanguageModel) -> list[str]:
    ours, theirs = memory(one), memory(other)
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def rewrite(updates: WeightUpdates, model: VisionLanguageModel, source: CheckpointReader, *, is_part=False) -> None:
    outline, matched = updates.match(source, is_part=is_part)
    beats = list[None]()
    Rewriter(model, outline).write(matched, lambda: beats.append(None))
    assert len(beats) >= len(matched), "a watchdog sees that it gets on"
    model.repack_head()


def two(family: str, tmp_path: Path, **how) -> tuple[Path, Path]:
    return make_checkpoint(family, tmp_path / "one", seed=1, **how), make_checkpoint(
        family, tmp_path / "two", seed=2, shards=3, **how
    )


@pytest.mark.parametrize("mode", [None, "int8", "int4", "w8a8"])
@pytest.mark.parametrize("family", [*ALL_FAMILIES, *HYBRIDS, STREAMED])
def test_a_model_becomes_another_one(family: str, mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows come in pieces that end within a panel, and within an expert."""
    monkeypatch.setattr(reader, "_PART_BYTES", 5000)
    one, two_ = two(family, tmp_path)
    model, wanted = packed(one, mode), packed(two_, mode)
    before = {name: part.data_ptr() for name, part in memory(model).items()}
    assert differing(model, wanted), "they differ at first"
    rewrite(WeightUpdates(one, model, without_weights=False), model, CheckpointReader(two_))
    assert not differing(model, wanted)
    assert {name: part.data_ptr() for name, part in memory(model).items()} == before


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("family", OMNI_FAMILIES)
def test_ears_become_others(family: str, kernels, tmp_path: Path):
    """Convolutions are packed in another order than they are stored in."""
    library.activate(kernels, threads=1)
    one, two_ = (make_omni_checkpoint(family, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    model, wanted = packed(one), packed(two_)
    assert any(".ears.conv" in name for name in differing(model, wanted))
    rewrite(WeightUpdates(one, model, without_weights=False), model, CheckpointReader(two_))
    assert not differing(model, wanted)


@pytest.mark.parametrize("mode", [None, "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_of_merged_weights_come_one_by_one(tied: bool, mode, tmp_path: Path):
    one, two_ = two("qwen2_5_vl", tmp_path, tied=tied)
    model, wanted = packed(one, mode, dtype=torch.bfloat16), packed(two_, mode, dtype=torch.bfloat16)
    updates = WeightUpdates(one, model, without_weights=False)
    tensors = list(CheckpointReader(two_).tensors.items())
    random.Random(5).shuffle(tensors)
    for first in range(0, len(tensors), 7):
        assert differing(model, wanted), "some are still to come"
        rewrite(updates, model, GivenTensors(two_, dict(tensors[first : first + 7])), is_part=True)
    assert not differing(model, wanted)


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("layout", ["inputs_first", "outputs_first", "each"])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_parts_of_a_model_with_experts(kernels, layout, ep_size: int, tmp_path: Path):
    """Each process takes its own part, whichever way the experts of the other checkpoint lie."""
    library.activate(kernels, threads=1)
    one = make_checkpoint(MOE, tmp_path / "one", seed=1)
    two_ = make_checkpoint(MOE, tmp_path / "two", seed=2)
    other = make_checkpoint(MOE, tmp_path / "other", seed=2, experts=layout)
    for rank in range(2):
        shard = Shard(rank, 2, experts=ExpertSharing(ep_size=ep_size))
        model, wanted = packed(one, None, shard), packed(two_, None, shard)
        rewrite(WeightUpdates(one, model, without_weights=False), model, CheckpointReader(other))
        assert not differing(model, wanted)


def test_the_head_that_guesses_belongs_to_the_model(tmp_path: Path):
    one, two_ = two(HYBRID_MOE, tmp_path, mtp=True)
    model, wanted = (load_model(folder, mtp=True) for folder in (one, two_))
    for each in (model, wanted):
        each.pack()
    rewrite(WeightUpdates(one, model, without_weights=False), model, CheckpointReader(two_))
    assert not differing(model, wanted)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path):
    one, two_ = two("qwen3_vl", tmp_path)
    model = packed(one)
    updates, right = WeightUpdates(one, model, without_weights=False), packed(one)
    tensors = {name: torch.zeros(part.shape) for name, part in CheckpointReader(two_).tensors.items()}
    name = "model.visual.merger.linear_fc2.bias"
    for text, wrong in {
        f"missing: {name.removeprefix('model.')}": {key: one for key, one in tensors.items() if key != name},
        rf"wrong shape: {name} is \[63\], not \[64\]": tensors | {name: torch.zeros(63)},
        f"another dtype: {name} is bfloat16, not float32": tensors | {name: torch.zeros(64, dtype=torch.bfloat16)},
        "unexpected: model.nothing": tensors | {"model.nothing": torch.zeros(1)},
    }.items():
        folder = tmp_path / "wrong"
        folder.mkdir(exist_ok=True)
        write_safetensors(folder, wrong)
        with pytest.raises(CheckpointError, match=text):
            updates.match(CheckpointReader(folder), is_part=False)
    other = make_checkpoint("qwen2_vl", tmp_path / "family")
    with pytest.raises(CheckpointError, match="model_type is 'qwen2_vl', not 'qwen3_vl'"):
        updates.check_config(other)
    text = (two_ / "config.json").read_text()
    (two_ / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(CheckpointError, match="rms_norm_eps is 1e-05, not 1e-06"):
        updates.check_config(two_)
    assert not differing(model, right)
