"""Runs of pages against a plain set."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vlmserve.memory.page_extents import PageExtents


def runs_of(pages: set[int]) -> list[tuple[int, int]]:
    runs = []
    for page in sorted(pages):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "front"]), st.integers(0, 20), st.integers(0, 6))))
def test_equals_a_set(steps):
    extents, model = PageExtents(), set()
    for kind, start, count in steps:
        runs = dict(runs_of(model))
        if kind == "add" and not model & set(range(start, start + count)):
            extents.add(start, count)
            model |= set(range(start, start + count))
        elif kind == "remove":
            assert extents.remove(start) == runs.get(start, 0)
            model -= set(range(start, start + runs.get(start, 0)))
        elif kind == "front":
            taken = min(count, runs.get(start, 0))
            assert extents.take_front(start, count) == taken
            model -= set(range(start, start + taken))
        runs = runs_of(model)
        assert [(page, length) for page in range(30) if (length := extents.length_at(page))] == runs
        assert extents.total == len(model)
        assert extents.largest()[1] == max((length for _, length in runs), default=0)
        for wanted in range(1, 8):
            fitting = [(length, at) for at, length in runs if length >= wanted]
            assert extents.best_fit(wanted) == (min(fitting)[::-1] if fitting else None)
