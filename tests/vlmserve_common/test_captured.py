"""Collectives inside of graphs: counted when they are done, and gone before their group is."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fake_graphs import Recorder
from tests.recordable_group import make_recordable_groups
from vlmserve_common.parallel.group import CountingCapturer, ProcessGroup


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    make_recordable_groups(monkeypatch)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    return ProcessGroup(store, "g", rank=0, size=1, device=torch.device("cpu"))


def test_replays_count_what_they_hold(group: ProcessGroup) -> None:
    x = torch.zeros(6)

    def step() -> None:
        x.add_(1)
        group.all_reduce(x)
        group.all_reduce(x[:2])

    recorder = Recorder()
    graph = CountingCapturer(recorder, group).capture(step)
    assert (group.counts["all_reduce"], group.bytes["all_reduce"]) == (2, 32)  # to warm up
    before = x.clone()
    for _ in range(3):
        graph.replay()
    assert x.equal(before + 3)
    assert (group.counts["all_reduce"], group.bytes["all_reduce"]) == (8, 128)
    group.close()


def test_graphs_are_gone_before_the_group(group: ProcessGroup) -> None:
    x, there = torch.zeros(1), []
    kept = CountingCapturer(Recorder(), group).capture(lambda: group.all_reduce(x))
    weakref.finalize(kept._graph, lambda: there.append(group._group is not None))
    assert there == []
    group.close()
    assert there == [True]
