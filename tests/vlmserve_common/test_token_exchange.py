"""Groups that have tokens of their own, brought together and taken apart again, by processes that are threads."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank_threads import Together
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.shard import Shard
from vlmserve_common.compute.token_exchange import TokenExchange, TokenLayout, layout_of, rows_moved

WIDTH = 3


class World:
    """All processes of some groups. rows moved: by the first one."""

    def __init__(self, groups: int, members: int) -> None:
        self.groups, self.members = groups, members
        self._everybody = Together(groups * members)
        self._peers = [Together(groups) for _ in range(members)]
        self._own = [Together(members) for _ in range(groups)]

    def comm(self, rank: int) -> Communicator:
        group, member = divmod(rank, self.members)
        own = self._own[group].of(member) if self.members > 1 else None
        everybody = self._everybody.of(rank)
        tokens = TokenExchange(
            group,
            self.groups,
            peers=self._peers[member].of(group),
            members=own,
            num_members=self.members,
            everybody=everybody,
        )
        shard = Shard(rank, self.groups * self.members, groups=self.groups)
        return Communicator(shard, everybody, own, tokens)

    @property
    def moved(self) -> float:
        return self._everybody.moved + self._peers[0].moved + self._own[0].moved

    def run(self, work) -> list:
        size = self.groups * self.members
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work, range(size)))


@settings(max_examples=40, deadline=None)
@given(
    members=st.integers(1, 2),
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any),
    seed=st.integers(0, 99),
)
def test_a_shared_mlp_of_all_tokens_is_that_of_each_group_alone(members: int, sizes: list[int], seed: int):
    """Each process has some columns of a product, as an MLP's part: its own tokens' sums come back, and no more is
    moved than is said."""
    world, size = World(len(sizes), members), len(sizes) * members
    made = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(-9, 9, (count, WIDTH), generator=made).double() for count in sizes]
    weights = torch.randint(-9, 9, (size, WIDTH, WIDTH), generator=made).double()

    def work(rank: int) -> torch.Tensor:
        comm = world.comm(rank)
        with comm.tokens.among(sizes):
            together = comm.all_tokens(tokens[rank // members])
            return comm.all_reduce(together @ weights[rank])

    for rank, found in enumerate(world.run(work)):
        assert torch.equal(found, tokens[rank // members] @ weights.sum(0))
    assert world.moved == pytest.approx(rows_moved(layout_of(sizes, members), members))


@given(members=st.integers(1, 8), sizes=st.lists(st.integers(0, 5000), min_size=2, max_size=16).filter(any))
def test_the_layout_is_the_one_that_moves_less(members: int, sizes: list[int]):
    chosen = layout_of(sizes, members)
    other = TokenLayout(tuple(sizes), not chosen.padded)
    assert rows_moved(chosen, members) <= rows_moved(other, members)
    spans = [chosen.of_group(group) for group in range(len(sizes))]
    assert [span.stop - span.start for span in spans] == sizes
    covered = Counter(row for span in spans for row in range(span.start, span.stop)) if sum(sizes) < 500 else {}
    assert all(count == 1 for count in covered.values())
    assert all(span.stop <= chosen.rows for span in spans)


def test_alike_groups_are_padded_and_one_alone_is_not():
    assert layout_of([8, 8, 8, 8]).padded
    assert layout_of([7, 8, 6, 8]).padded
    assert not layout_of([8, 0, 0, 0]).padded
    assert layout_of([8, 0, 0, 0]).rows == 8
    assert not layout_of([8, 0]).padded, "both move as much, and 8 rows are fewer than 16"
    assert rows_moved(TokenLayout((8, 8, 8, 8), True), 1) == 2 * 3 * 8
    assert rows_moved(TokenLayout((8, 0, 0, 0), False), 1) == 2 * 2 * 3 / 4 * 8


def test_without_a_word_all_groups_have_as_many():
    world = World(3, 1)

    def work(rank: int) -> torch.Tensor:
        comm = world.comm(rank)
        return comm.all_reduce(comm.all_tokens(torch.full((2, 1), float(rank))))

    assert [found.tolist() for found in world.run(work)] == [[[3.0 * rank]] * 2 for rank in range(3)]


def test_attention_is_cut_among_those_who_have_the_same_tokens():
    assert [Shard(rank, 4, groups=2).attention.cut(8, "heads").start for rank in range(4)] == [0, 4, 0, 4]
    assert Shard(1, 2, groups=2).attention.is_whole
