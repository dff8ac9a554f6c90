"""Which sizes of decode steps are captured, and how many of them memory affords."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmserve.engine.graph_planning import GraphCost, affordable, batch_sizes, chosen_sizes, shown


def test_usual_sizes() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(5) == (1, 2, 4, 5)
    assert batch_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert batch_sizes(100)[-4:] == (64, 80, 96, 100)
    assert batch_sizes(512)[-3:] == (448, 480, 512)


@given(st.integers(1, 2000))
def test_padding_is_little(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    for size, larger in itertools.pairwise(sizes):
        assert larger - size <= max(8, larger / 4)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 2, 4, 8, 10)),
        ({"max_running_requests": 4096}, batch_sizes(256)),
        ({"max_running_requests": 4096, "most": 600}, batch_sizes(600)),
        ({"most": 3}, (1, 2, 3)),
        ({"given": (8, 3, 1, 3)}, (1, 3, 8)),
        ({"given": (1, 64, 128)}, (1, 10)),
        ({"given": (1, 64, 300), "max_running_requests": 512}, (1, 64, 300)),
        ({"given": (1, 64, 128), "max_running_requests": 512, "most": 100}, (1, 64, 100)),
    ],
    ids=str,
)
def test_chosen(settings: dict, sizes: tuple[int, ...]) -> None:
    assert chosen_sizes(**{"max_running_requests": 10, "given": None, "most": None, **settings}) == sizes


def test_what_memory_affords() -> None:
    sizes, cost = (1, 2, 4, 8), GraphCost(first=100, more=10)
    assert [cost.of(count) for count in range(4)] == [0, 100, 110, 120]
    assert affordable(sizes, cost, 130) == sizes
    assert affordable(sizes, cost, 129) == (1, 2, 4)
    assert affordable(sizes, cost, 100) == (1,)
    assert affordable(sizes, cost, 99) == affordable(sizes, cost, -5) == ()


def test_in_words() -> None:
    assert shown((1, 2, 4, 8)) == "1, 2, 4, 8"
    assert shown((1, 2, 4, 8, 16)) == "1, 2, 4 ... 16"
