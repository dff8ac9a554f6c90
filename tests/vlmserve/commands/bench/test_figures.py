"""Alternatives take turns, and a target is met from its own side."""

from __future__ import annotations

from vlmserve.commands.bench.figures import Measure, Spread, in_turns, ratios


def test_alternatives_take_turns():
    order = []
    timings = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b"] * 3
    assert [len(timing.cpu) for timing in timings.values()] == [2, 2]
    assert str(ratios((2.0, 9.0, 4.0), (1.0, 3.0, 1.0))) == "3.00 x (2.00 to 4.00)"


def test_a_target_is_met_from_its_own_side():
    def measure(value, bound):
        return Measure(name="", spread=Spread.of([value]), target=2.0, bound=bound)

    assert [measure(value, "at least").met for value in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [measure(value, "at most").met for value in (1.9, 2.0, 2.1)] == [True, True, False]
    assert Measure(name="", spread=Spread.of([1.0])).met is None
