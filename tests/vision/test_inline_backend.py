"""Batches between other things: the time that `work` takes, whose turn it is, what is given up. By a fake clock."""

from __future__ import annotations

import gc
import math
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_checkpoints import make_checkpoint
from tests.vision.patches import directly, make_levels, random_patches
from vision.towers.loading import load_tower
from vision.towers.pieces import Kind, Piece, PieceLimits, Steps
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import EncodeBatch, TemporalPatch
from vision.workers.inline import InlineBackend, Pace

SPEED = 100e9
PIECE_S = 0.01


class FakeTower:
    """A runner of 1e9 FLOP a patch, at `speed` a second. log: whose pieces were computed, and their seconds. closed:
    what was given up. fail: digests that fail at their second piece."""

    def __init__(self, speed: float = SPEED) -> None:
        self.now = 0.0
        self.speed = speed
        self.log: list[tuple[bytes, float]] = []
        self.closed: list[bytes] = []
        self.fail: set[bytes] = set()

    def clock(self) -> float:
        return self.now

    def steps(self, patches: Sequence[TemporalPatch], limits: PieceLimits) -> Steps[tuple[torch.Tensor, ...]]:
        [patch] = patches
        left = self.cost(patches)[Kind.PRODUCT]
        first = True
        try:
            while left > 0:
                cost = min(left, limits(Kind.PRODUCT))
                yield Piece(Kind.PRODUCT, cost)
                assert torch.is_inference_mode_enabled()
                if patch.digest in self.fail and not first:
                    raise RuntimeError("poisoned")
                self.now += cost / self.speed
                self.log.append((patch.digest, cost / self.speed))
                left, first = left - cost, False
        except GeneratorExit:
            self.closed.append(patch.digest)
            raise
        return (torch.full((1, 1), patch.digest[0]),)

    def cost(self, patches: Sequence[TemporalPatch]) -> Mapping[Kind, float]:
        return {Kind.PRODUCT: sum(patch.num_patches * 1e9 for patch in patches)}


def patch_of(name: str, patches: int) -> TemporalPatch:
    return TemporalPatch(digest=name.encode(), grid=(1, patches), pixels=np.zeros((patches, 1)))


class Rig:
    def __init__(self, speed: float = SPEED, most_batches: int = 2) -> None:
        self.tower = FakeTower(speed)
        self.backend = InlineBackend(self.tower, piece_s=PIECE_S, most_batches=most_batches, clock=self.tower.clock)
        self.started = 0

    def start(self, name: str, patches: int) -> int:
        self.started += 1
        self.backend.start(0, EncodeBatch(number=self.started, patches=(patch_of(name, patches),)))
        return self.started

    def learn(self) -> None:
        """Let it find out how fast the tower is."""
        self.start("!", 10)
        self.backend.work(math.inf)
        self.backend.collect()
        self.tower.log.clear()
        self.tower.now = 0.0

    def spent(self) -> dict[str, float]:
        """Seconds on each batch."""
        found: dict[str, float] = {}
        for digest, seconds in self.tower.log:
            found[digest.decode()] = found.get(digest.decode(), 0.0) + seconds
        return found


def test_work_takes_the_time_that_it_is_given_and_collect_none():
    rig = Rig()
    rig.learn()
    rig.start("a", 100)  # a second
    rig.backend.work(0.0)
    before = rig.tower.now
    assert rig.backend.collect() == []
    assert rig.tower.now == before
    for _ in range(20):
        began = rig.tower.now
        assert rig.backend.work(0.035)
        assert 0.025 <= rig.tower.now - began <= 0.0351
    assert rig.backend.has_work
    assert rig.backend.work(math.inf)
    assert not rig.backend.has_work
    assert not rig.backend.work(math.inf)
    [result] = rig.backend.collect()
    assert (result.number, result.embeds[0].item()) == (2, ord("a"))
    assert rig.tower.now == pytest.approx(1.0)


@settings(deadline=None)
@given(
    speed=st.sampled_from([5e9, 100e9, 3e12]),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    budgets=st.lists(st.floats(0, 0.2), min_size=1, max_size=30),
)
def test_a_call_computes_one_piece_at_least_and_never_much_longer_than_allowed(speed, sizes, budgets):
    rig = Rig(speed)
    rig.learn()
    for number, size in enumerate(sizes):
        rig.start("abcde"[number], size)
    most = 0.0
    for budget in budgets:
        began, computed = rig.tower.now, len(rig.tower.log)
        worked = rig.backend.work(budget)
        assert worked == (len(rig.tower.log) > computed)
        # a piece that was left for want of time may be as large as there was time for then
        most = max(most, budget)
        assert rig.tower.now - began <= max(budget, PIECE_S, min(0.1, most * 0.25)) * 1.001
    rig.backend.work(math.inf)
    results = rig.backend.collect()
    assert sorted(result.number for result in results) == list(range(2, len(sizes) + 2))
    assert rig.tower.now == pytest.approx(sum(sizes) * 1e9 / speed)


def test_a_small_picture_does_not_wait_for_a_large_one_that_gets_on_all_the_same():
    rig = Rig()
    large = rig.start("l", 1000)  # ten seconds
    while rig.tower.now < 1.0:
        rig.backend.work(0.04)
    small = rig.start("s", 30)  # 0.3 s
    began = rig.tower.now
    while not (results := rig.backend.collect()):
        rig.backend.work(0.05)
    assert [result.number for result in results] == [small]
    assert rig.tower.now - began <= 0.3 * 4 / 3 + 0.06
    assert rig.spent()["l"] - began >= 0.3 / 3 - 0.02
    rig.backend.work(math.inf)
    assert [result.number for result in rig.backend.collect()] == [large]


def test_a_stream_of_small_pictures_leaves_the_large_one_its_share():
    rig = Rig()
    large = rig.start("l", 200)  # two seconds
    rig.backend.work(0.0)
    began, done = rig.tower.now, []
    while large not in done:
        rig.start("s", 10)
        rig.backend.work(0.1)
        done += [result.number for result in rig.backend.collect()]
    assert rig.tower.now - began <= 2.0 * 4 + 0.2
    assert rig.spent()["s"] > 2.0 * 2


@settings(deadline=None)
@given(
    most=st.integers(1, 3),
    events=st.lists(st.one_of(st.integers(1, 100), st.floats(0, 0.3), st.just("cancel")), max_size=40),
    data=st.data(),
)
def test_no_more_batches_than_allowed_are_in_work_and_each_has_one_result(most, events, data):
    rig = Rig(most_batches=most)
    cancelled: set[int] = set()
    results = []
    for event in events:
        if event == "cancel":
            if rig.started:
                number = data.draw(st.integers(1, rig.started))
                rig.backend.cancel(0, number)
                cancelled.add(number)
        elif isinstance(event, int):
            rig.start(f"{rig.started:02}", event)
        else:
            rig.backend.work(event)
        begun = {digest for digest, _ in rig.tower.log}
        results += rig.backend.collect()
        assert len(begun) - sum(one.embeds is not None for one in results) - len(rig.tower.closed) <= most
    rig.backend.work(math.inf)
    assert not rig.backend.has_work
    results += rig.backend.collect()
    assert sorted(result.number for result in results) == list(range(1, rig.started + 1))
    for result in results:
        assert result.embeds is not None or (result.untried and result.number in cancelled)


def test_a_failure_half_way_is_the_result_of_its_batch_alone():
    rig = Rig()
    rig.tower.fail = {b"a"}
    bad, good = rig.start("a", 100), rig.start("b", 100)
    rig.backend.work(math.inf)
    results = {result.number: result for result in rig.backend.collect()}
    assert (results[bad].embeds, results[bad].error) == (None, "RuntimeError: poisoned")
    assert not results[bad].untried
    assert results[good].embeds is not None
    assert not rig.backend.has_work


def test_the_pace_follows_a_machine_that_becomes_slower_and_forgives_one_slow_piece():
    pace = Pace(PIECE_S)
    piece = Piece(Kind.ATTENTION, 1e9)
    for _ in range(100):
        pace.took(piece, 0.01)
    pace.took(piece, 0.1)
    assert pace.seconds(Kind.ATTENTION, 1e9) < 0.0125
    for _ in range(200):
        pace.took(piece, 0.03)
    assert pace.seconds(Kind.ATTENTION, 1e9) == pytest.approx(0.03, rel=0.05)
    assert pace.most(Kind.ATTENTION) == pytest.approx(1e9 / 3, rel=0.05)


def test_one_thread_may_give_and_take_while_another_computes():
    rig = Rig()
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set() or rig.backend.has_work:
            rig.backend.work(0.01)

    thread = threading.Thread(target=compute)
    thread.start()
    found = []
    for _ in range(200):
        number = rig.start("a", 3)
        if number % 3 == 0:
            rig.backend.cancel(0, number)
        found += rig.backend.collect()
    stop.set()
    thread.join(60)
    found += rig.backend.collect()
    assert sorted(result.number for result in found) == list(range(1, 201))


class Gate:
    """A mark that passes when it is told to, or fails."""

    def __init__(self) -> None:
        self.open = False
        self.error: Exception | None = None

    def passed(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.open


class GatedLane:
    """A lane whose device is as slow as a test says. inside: whether something is being launched in it."""

    beside = True

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self.handed_over: list[int] = []
        self.inside = False

    @contextmanager
    def launching(self):
        self.inside = True
        yield
        self.inside = False

    def mark(self) -> Gate:
        self.gates.append(Gate())
        return self.gates[-1]

    def hand_over(self, tensors) -> None:
        self.handed_over.append(len(tensors))


class LaunchingTower(FakeTower):
    """Its pieces are launched in a lane."""

    lane: GatedLane

    def steps(self, patches, limits):
        for piece in super().steps(patches, limits):
            assert self.lane.inside
            yield piece
        assert self.lane.inside
        return (torch.full((1, 1), patches[0].digest[0]),)


def on_a_lane() -> tuple[InlineBackend, GatedLane]:
    tower = LaunchingTower()
    tower.lane = lane = GatedLane()
    backend = InlineBackend(tower, piece_s=PIECE_S, lane=lane, clock=tower.clock)
    for number, name in ((1, "a"), (2, "b")):
        backend.start(0, EncodeBatch(number=number, patches=(patch_of(name, 2),)))
    return backend, lane


def test_a_batch_has_its_result_when_the_device_has_computed_it():
    backend, lane = on_a_lane()
    assert backend.work(math.inf), "both are launched"
    assert len(lane.gates) == 2
    assert not backend.work(math.inf)
    assert backend.has_work, "there is something to ask for"
    assert backend.collect() == []
    lane.gates[0].open = True
    assert backend.work(math.inf)
    assert [result.number for result in backend.collect()] == [1]
    assert lane.handed_over == [1]
    assert backend.has_work
    lane.gates[1].open = True
    assert backend.work(math.inf)
    [second] = backend.collect()
    assert (second.number, second.embeds[0].item()) == (2, ord("b"))
    assert not backend.has_work


def test_what_fails_on_the_device_is_the_result_s_error():
    backend, lane = on_a_lane()
    backend.work(math.inf)
    lane.gates[0].error = RuntimeError("CUDA error: an illegal memory access")
    lane.gates[1].open = True
    assert backend.work(math.inf)
    bad, good = backend.collect()
    assert bad.embeds is None
    assert "illegal memory access" in bad.error
    assert good.embeds is not None
    assert lane.handed_over == [1]


CPU = torch.device("cpu")


def test_rows_have_memory_of_their_own(small):
    for rows in TowerRunner(small, CPU).encode(random_patches(small)):
        assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.fixture
def small(tmp_path):
    return load_tower(make_checkpoint("qwen2_vl", tmp_path))


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        ([make_levels((4, 4), 1176), make_levels((3, 4), 1176)], r"ValueError: grid \(1, 3, 4\): .* multiples of 2"),
        ([make_levels((4, 4), 1176), make_levels((4, 4), 1170)], "ValueError: .*not of one tower"),
        ([make_levels((4, 4), 1170)], "RuntimeError: .*shape"),
    ],
    ids=["grid", "unlike-widths", "width"],
)
def test_a_failure_is_the_result_of_its_batch_alone(small, patches, message):
    backend = InlineBackend(TowerRunner(small, CPU))
    good = make_levels((4, 4), 1176)
    backend.start(0, EncodeBatch(number=1, patches=tuple(patches)))
    backend.start(0, EncodeBatch(number=2, patches=(good,)))
    backend.work(math.inf)
    failed, done = sorted(backend.collect(), key=lambda result: result.number)  # the shortest goes first
    assert (failed.number, failed.embeds) == (1, None)
    assert re.match(message, failed.error)
    assert torch.equal(done.embeds[0], directly(small, [good]))


def test_pixels_of_another_grid_are_refused_though_the_batch_has_as_many_as_it_should(small):
    wide, tall = make_levels((4, 6), 1176), make_levels((2, 4), 1176)
    swapped = [
        replace(wide, pixels=tall.pixels),
        replace(tall, pixels=wide.pixels),
    ]
    with pytest.raises(ValueError, match=r"grid \(4, 6\) has 24 patches, not 8"):
        TowerRunner(small, CPU).encode(swapped)


def test_out_of_memory_frees_the_failed_batch_before_the_cache_is_emptied(small, monkeypatch):
    left = []

    class Full(TowerRunner):
        def steps(self, patches, limits):
            held = torch.zeros(3)
            yield Piece(Kind.PRODUCT, 1.0)
            left.append(weakref.ref(held))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(left[-1]() is None))
    backend = InlineBackend(Full(small, CPU))
    backend.start(0, EncodeBatch(number=1, patches=(make_levels((2, 2), 1176),)))
    gc.disable()
    try:
        backend.work(math.inf)
    finally:
        gc.enable()
    [result] = backend.collect()
    assert result.error == "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB"
    assert emptied == [True]
