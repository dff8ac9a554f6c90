"""Parts of a model's experts: what each rank has and reads, in all layouts of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_checkpoints import MOE, make_checkpoint, write_safetensors
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint import stream
from vlmserve_common.compute.expert_part import part_of_experts
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.shard import ExpertSharing, Shard
from vlmserve_common.errors import EngineError

COUNT, INNER = 8, 40


@pytest.fixture(scope="module", params=["inputs_first", "outputs_first", "each"])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts lie so."""
    folder = make_checkpoint(MOE, tmp_path_factory.mktemp(request.param) / "model")
    lay_out(folder, request.param)
    return folder


def lay_out(folder: Path, layout: str) -> None:
    """Rewrite a checkpoint of the published layout, in place."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        weights = tensors[name].transpose(1, 2).contiguous() if layout != "inputs_first" else tensors[name]
        if layout != "each":
            tensors[name] = weights
            continue
        prefix, _, leaf = name.rpartition(".")
        del tensors[name]
        for expert, weight in enumerate(weights):
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                tensors[f"{prefix}.{expert}.{part}.weight"] = piece.contiguous()
    write_safetensors(folder, tensors, 1)


def experts_of(model) -> list[Experts]:
    return [child for child in model.modules() if isinstance(child, Experts)]


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 1)])
def test_every_rank_has_its_part_of_each_expert(folder: Path, tp: int, ep: int, monkeypatch: pytest.MonkeyPatch):
    """Together they have all, once; and none of them reads more, but for the rest of rows."""
    read: list[stream.Part] = []
    run = stream.Stream.run

    def watched(self: stream.Stream, parts, done):
        parts = list(parts)
        read.extend(part for part in parts if ".experts." in part.name)
        run(self, parts, done)

    whole = load_model(folder)
    monkeypatch.setattr(stream.Stream, "run", watched)
    seen = [[torch.zeros_like(weights) for weights in experts.weights] for experts in experts_of(whole)]
    members, size = tp // ep, INNER * ep // tp
    for rank in range(tp):
        read.clear()
        model = load_model(folder, shard=Shard(rank, tp, experts=ExpertSharing(ep_size=ep)), with_tower=False)
        for layer, (experts, expected) in enumerate(zip(experts_of(model), experts_of(whole), strict=True)):
            own = slice(rank // members * COUNT // ep, (rank // members + 1) * COUNT // ep)
            inner = slice(rank % members * size, (rank % members + 1) * size)
            assert experts.part.own == tuple(range(COUNT))[own]
            gate_up, down = experts.weights
            halves = expected.weights[0].unflatten(1, (2, INNER))[own, :, inner]
            assert torch.equal(gate_up, halves.flatten(1, 2))
            assert torch.equal(down, expected.weights[1][own, :, inner])
            seen[layer][0].unflatten(1, (2, INNER))[own, :, inner] += 1
            seen[layer][1][own, :, inner] += 1
        held = sum(weights.nbytes for experts in experts_of(model) for weights in experts.weights)
        assert sum(part.target.nbytes for part in read) == held
    assert all(torch.all(count == 1) for layer in seen for count in layer)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard(0, 3, experts=ExpertSharing(ep_size=3)), "--ep-size is 3: num_experts is 8, which it does not divide"),
        (Shard(0, 16), "--tp-size is 16: 16 ranks cut each expert, whose moe_intermediate_size is 40"),
    ],
)
def test_what_cannot_be_shared_is_refused(shard: Shard, message: str):
    with pytest.raises(EngineError, match=message):
        part_of_experts(COUNT, INNER, shard)
