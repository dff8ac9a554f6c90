"""Where experts are put by their loads, and how their weights get there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_graphs import Recorder
from tests.rank_threads import at_all
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.expert_exchange import Slots, dispatch, moves_less_dispatched
from vlmserve_common.compute.expert_part import first_placement, part_of_experts
from vlmserve_common.compute.expert_placement import imbalance, move, place
from vlmserve_common.compute.experts import Experts, SparseMLP
from vlmserve_common.compute.shard import ExpertSharing, Shard
from vlmserve_common.errors import EngineError

COUNT, SIZE, INNER, CHOSEN = 6, 16, 8, 2


@given(
    st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    st.sampled_from([(2, 0), (2, 8), (4, 0), (4, 4), (4, 20), (8, 56)]),
)
def test_every_expert_has_a_place_and_none_two_at_a_party(loads: list[int], sizes: tuple[int, int]):
    parties, redundant = sizes
    old = tuple(slot % 8 for slot in range(8 + redundant))
    new = place(loads, old, parties)
    each = len(new) // parties
    assert len(new) == len(old)
    assert set(new) == set(range(8))
    for party in range(parties):
        own, before = (one[party * each : (party + 1) * each] for one in (new, old))
        assert len(set(own)) == each
        stay = set(own) & set(before)
        assert all(own[before.index(expert)] == expert for expert in stay)
    assert place(loads, new, parties) == new  # nothing moves to and fro


def test_a_busy_expert_gets_the_copies():
    loads, old = [90, 10, 10, 10], (0, 1, 2, 3, 0, 1)
    new = place(loads, old, 2)
    assert new.count(0) == 2
    assert imbalance(loads, (0, 1, 2, 3), 2) == pytest.approx(100 / 60)
    assert imbalance(loads, new, 2) == pytest.approx(1.0)


def test_too_many_copies_are_refused():
    shard = Shard(0, 2, experts=ExpertSharing(ep_size=2, redundant=10))
    with pytest.raises(EngineError, match=r"--ep-num-redundant-experts is 10: 2 parties .* room for 6 copies of 6"):
        first_placement(COUNT, shard)


def test_rows_are_sent_where_that_moves_less():
    def shard(ep_size: int) -> Shard:
        return Shard(0, ep_size, experts=ExpertSharing(ep_size=ep_size))

    assert not moves_less_dispatched(8, shard(2))
    assert not moves_less_dispatched(8, shard(8))
    assert moves_less_dispatched(8, shard(16))
    assert moves_less_dispatched(1, shard(4))


def whole_mlp() -> SparseMLP:
    mlp = SparseMLP(SIZE, INNER, COUNT, CHOSEN, activation("silu"))
    for seed, parameter in enumerate(mlp.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return mlp


def part_of(whole: SparseMLP, comm: Communicator) -> SparseMLP:
    mlp = SparseMLP(SIZE, INNER, COUNT, CHOSEN, activation("silu"), comm)
    fill(mlp.experts, whole.experts)
    mlp.gate.weight.copy_(whole.gate.weight)
    return mlp


def fill(experts: Experts, whole: Experts) -> None:
    part = experts.part
    inner = slice(part.first, part.first + part.size)
    gate_up, down = (weights[list(part.own)] for weights in whole.weights)
    experts.weights[0].copy_(gate_up.unflatten(1, (2, INNER))[:, :, inner].flatten(1, 2))
    experts.weights[1].copy_(down[:, :, inner])


@torch.inference_mode()
@pytest.mark.parametrize(("size", "ep_size"), [(2, 1), (2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("a2a", ["none", "torch"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_ranks_make_what_one_makes_also_after_a_move(size: int, ep_size: int, a2a: str, tokens: int):
    if size // ep_size > 1 and INNER % (size // ep_size):
        return
    whole = whole_mlp()
    x = torch.randn(tokens, SIZE, generator=torch.Generator().manual_seed(9))
    wanted = whole(x)
    redundant = 0 if ep_size == 1 else ep_size * 1

    def work(comm: Communicator) -> list[torch.Tensor]:
        sharing = ExpertSharing(ep_size=ep_size, a2a=a2a, redundant=redundant, counted=True)
        comm = replace(comm, shard=replace(comm.shard, experts=sharing))
        mlp = part_of(whole, comm)
        found = [mlp(x.clone())]
        loads = [50, 1, 2, 40, 3, 30]
        moved = move(mlp.experts, mlp.slots, place(loads, mlp.slots.placement, ep_size), comm)
        assert moved > 0 or ep_size == 1
        again = part_of_experts(COUNT, INNER, comm.shard)
        assert (mlp.experts.part.own != again.own) == (moved > 0) or ep_size > 2
        found.append(mlp(x.clone()))
        assert mlp.slots.take_counts().sum() == 2 * tokens * CHOSEN
        return found

    for found in at_all(size, work):
        for out in found:
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    "placements",
    [
        ((0, 1, 2, 3, 0, 1, 4, 5), (5, 4, 3, 2, 1, 0, 5, 4), (0, 1, 2, 3, 4, 5, 0, 1)),
        ((5, 1, 3, 2, 0, 4), (0, 1, 2, 3, 4, 5), (3, 4, 5, 0, 1, 2)),
    ],
)
def test_a_captured_step_sees_that_experts_moved(placements: tuple[tuple[int, ...], ...]):
    """Its tables and counts are where they were."""
    redundant = len(placements[0]) - COUNT
    shard = Shard(0, 2, experts=ExpertSharing(ep_size=2, redundant=redundant, counted=True))
    slots, ids = Slots(COUNT, shard), torch.arange(COUNT).repeat(2, 1).t()[:, :CHOSEN].contiguous()
    found = torch.empty_like(ids)

    def step() -> None:
        slots.note(ids)
        found.copy_(slots.of(ids))

    graph = Recorder().capture(step)
    slots.take_counts()
    for placement in placements:
        slots.place(placement)
        graph.replay()
        assert torch.tensor(placement)[found].equal(ids)
        assert found.equal(slots.of(ids))
        assert slots.take_counts().equal(torch.full((COUNT,), CHOSEN))


@torch.inference_mode()
def test_tokens_of_their_own_also_none():
    """What attention in parallel over requests needs: each rank has other tokens, and not as many."""
    whole = whole_mlp()
    tokens = [torch.randn(count, SIZE, generator=torch.Generator().manual_seed(count)) for count in (5, 0, 2)]

    def work(comm: Communicator) -> torch.Tensor:
        comm = replace(comm, shard=replace(comm.shard, experts=ExpertSharing(ep_size=3)))
        mlp, own = part_of(whole, comm), tokens[comm.shard.rank]
        ids, scores = mlp.gate.choose(own)
        slots = Slots(COUNT, comm.shard)
        return dispatch(own, (slots.of(ids), scores), mlp.experts, slots, 3, comm.collectives)

    for rank, out in enumerate(at_all(3, work)):
        torch.testing.assert_close(out, whole(tokens[rank]), rtol=1e-5, atol=1e-5)
