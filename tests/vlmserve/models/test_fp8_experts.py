"""Experts of checkpoints whose weights are 8-bit floats: the numbers are those of the same checkpoint, dequantised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fp8_checkpoints import config_of
from tests.tiny_checkpoints import MOE, make_checkpoint, write_safetensors
from tests.vlmserve.models.test_expert_parts import experts_of
from vlmserve.models.registry import load_model
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.experts import ExpertLayout
from vlmserve_common.compute.shard import ExpertSharing, Shard
from vlmserve_common.errors import CheckpointError

BLOCK = (16, 8)
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module", params=["inputs_first", "outputs_first", "each"])
def folders(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_fp8_experts(tmp_path_factory.mktemp(request.param), request.param)


def make_fp8_experts(base: Path, experts: ExpertLayout) -> tuple[Path, Path]:
    """A checkpoint whose experts have 8 bits, and the same dequantised: base/a, base/b."""
    plain = make_checkpoint(MOE, base / "a", experts=experts)
    same = base / "b"
    shutil.copytree(plain, same)
    tensors, wide = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        scale = torch.rand(*wide[name].shape[:-2], *blocks_of(wide[name]), generator=torch.Generator().manual_seed(0))
        scale = (0.5 + scale) / 256
        spread = scale.repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)
        spread = spread[..., : wide[name].shape[-2], : wide[name].shape[-1]]
        tensors[name] = (wide[name].float() / spread).clamp(-448, 448).to(FP8)
        wide[name] = tensors[name].float() * spread
        tensors[f"{name}_scale_inv"] = scale
    write_safetensors(plain, tensors, 1)
    write_safetensors(same, wide, 1)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": config_of("block", BLOCK)}))
    return plain, same


def blocks_of(weights: torch.Tensor) -> tuple[int, int]:
    return -(-weights.shape[-2] // BLOCK[0]), -(-weights.shape[-1] // BLOCK[1])


def test_they_are_dequantised(folders: tuple[Path, Path]):
    for ours, theirs in zip(*(experts_of(load_model(folder)) for folder in folders), strict=True):
        for weights, wanted in zip(ours.weights, theirs.weights, strict=True):
            torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)


@torch.inference_mode()
def test_or_stay_as_they_are(folders: tuple[Path, Path]):
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    choice = torch.randint(0, 8, (20, 3), generator=torch.Generator().manual_seed(2)), torch.rand(20, 3)
    kept, plain = load_model(folders[0], keep_fp8=True), load_model(folders[1])
    for ours, theirs in zip(experts_of(kept), experts_of(plain), strict=True):
        assert all(weights.dtype == FP8 for weights in ours.weights)
        torch.testing.assert_close(ours(x, choice), theirs(x, choice), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 1)])
def test_of_a_part_scales_are_those_of_its_elements(folders: tuple[Path, Path], tp: int, ep: int, keep: bool):
    """Also where it begins within a block."""
    whole = experts_of(load_model(folders[1]))
    for rank in range(tp):
        comm = Communicator(Shard(rank, tp, experts=ExpertSharing(ep_size=ep)))
        model = load_model(folders[0], comm=comm, keep_fp8=keep, with_tower=False)
        for experts, expected in zip(experts_of(model), whole, strict=True):
            assert all((weights.dtype == FP8) is keep for weights in experts.weights)
            inner = slice(experts.part.first, experts.part.first + experts.part.size)
            for slot, expert in enumerate(experts.part.own):
                gate_up, down = (experts._weight_of(index, slot, torch.float32) for index in range(2))
                wanted = expected.weights[0][expert].unflatten(0, (2, 40))[:, inner].flatten(0, 1)
                torch.testing.assert_close(gate_up, wanted, rtol=1e-6, atol=0)
                torch.testing.assert_close(down, expected.weights[1][expert][:, inner], rtol=1e-6, atol=0)


def test_a_scale_that_does_not_fit_is_named(folders: tuple[Path, Path], tmp_path: Path):
    shutil.copytree(folders[0], tmp_path / "model")
    tensors = load_file(folders[0] / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name and name.endswith("_scale_inv"))
    write_safetensors(tmp_path / "model", tensors | {name: torch.ones(3, 3, 3)}, 1)
    with pytest.raises(CheckpointError, match=rf"{name} is \[3, 3, 3\] of torch.float32, not \["):
        load_model(tmp_path / "model")
    del tensors[name]
    write_safetensors(tmp_path / "model", tensors, 1)
    with pytest.raises(CheckpointError, match=f"{name.rpartition('.')[2]} is missing"):
        load_model(tmp_path / "model")
