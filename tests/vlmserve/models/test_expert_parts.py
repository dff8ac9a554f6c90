"""Parts of a model's experts: what each rank has and reads, in all layouts of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rank_threads import at_all
from tests.tiny_checkpoints import MOE, make_checkpoint
from vlmserve.models.config import ExpertsConfig
from vlmserve.models.qwen3_5 import SharedExpertMLP
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint import stream
from vlmserve_common.checkpoint.weights import stored_cuts, stored_tensors
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.shard import Box, Cut, ExpertSharing, Shard

COUNT, INNER = 8, 40


@pytest.fixture(scope="module", params=["inputs_first", "outputs_first", "each"])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts lie so."""
    return make_checkpoint(MOE, tmp_path_factory.mktemp(request.param) / "model", experts=request.param)


def experts_of(model) -> list[Experts]:
    return [child for child in model.modules() if isinstance(child, Experts)]


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 1)])
def test_every_rank_has_its_part_of_each_expert(folder: Path, tp: int, ep: int, monkeypatch: pytest.MonkeyPatch):
    """Together they have all, once; and none of them reads more, but for the rest of rows."""
    read: list[stream.Part] = []
    run = stream.Stream.run

    def watched(self: stream.Stream, parts, done):
        parts = list(parts)
        read.extend(part for part in parts if ".experts." in part.stored.name)
        run(self, parts, done)

    whole = load_model(folder)
    monkeypatch.setattr(stream.Stream, "run", watched)
    seen = [[torch.zeros_like(weights) for weights in experts.weights] for experts in experts_of(whole)]
    members, size = tp // ep, INNER * ep // tp
    for rank in range(tp):
        read.clear()
        model = load_model(
            folder, comm=Communicator(Shard(rank, tp, experts=ExpertSharing(ep_size=ep))), with_tower=False
        )
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


@torch.inference_mode()
@pytest.mark.parametrize("a2a", ["none", "torch"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_shared_expert_is_cut_and_added_with_the_others(ep_size: int, a2a: str):
    """As Qwen3.5-MoE has it."""
    config = ExpertsConfig(count=4, chosen=2, intermediate_size=8, sparse_layers=frozenset({0}), shared_size=12)
    whole = SharedExpertMLP(16, config, activation("silu"))
    for seed, parameter in enumerate(whole.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 4)
    x, residual = (torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)) for seed in (8, 9))
    stored = dict(stored_tensors(whole))

    def work(comm: Communicator) -> torch.Tensor:
        sharing = ExpertSharing(ep_size=ep_size, a2a=a2a)
        part = SharedExpertMLP(
            16, config, activation("silu"), replace(comm, shard=replace(comm.shard, experts=sharing))
        )
        cuts = stored_cuts(part)
        for name, target in stored_tensors(part):
            target.copy_(cut_out(stored[name], cuts.get(name)))
        return part(x.clone(), residual.clone())

    for found in at_all(2, work):
        torch.testing.assert_close(found, whole(x.clone(), residual.clone()), rtol=1e-5, atol=1e-5)


def cut_out(tensor: torch.Tensor, cut: Cut | Box | None) -> torch.Tensor:
    if isinstance(cut, Cut):
        return tensor.narrow(cut.dim, cut.start, cut.size)
    for dim, stretches in enumerate(cut.stretches if cut is not None else ()):
        tensor = torch.cat([tensor.narrow(dim, start, size) for start, size in stretches], dim)
    return tensor
