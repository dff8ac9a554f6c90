"""`vlmserve bench sched`: it keeps its load up, and prints and writes what it measured."""

from __future__ import annotations

import json

import pytest

from vlmserve.commands.bench.sched import SchedulerLoad, SchedulerSubject, main


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_the_load_is_kept_up(policy, depth):
    subject = SchedulerSubject(SchedulerLoad(running=8, waiting=30, policy=policy, depth=depth, clients=3))
    for _ in range(30):
        assert all(seconds >= 0 for seconds in subject.turns(30))
        here = len(subject.scheduler.waiting_queue) + len(subject.scheduler.waiting_queue.in_progress)
        assert abs(here + len(subject.scheduler.running_batch) + subject.ended - 38) <= 1
        assert len(subject.scheduler.running_batch) >= 6
    assert subject.scheduler.stats().finished_total > 10


def test_figures_are_printed_and_written(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["--running", "16", "--waiting", "50", "--turns", "20", "--rounds", "2", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "lpm, page size 1, 2 in flight" in shown
    assert "target: at most 5 ms" in shown
    figures = json.loads(file.read_text())["measures"]
    assert set(figures) == {"policies", "radix"}
    assert all(one["spread"]["median"] >= 0 for part in figures.values() for one in part)
    assert {one["target"] for one in figures["radix"]} == {1.0}
