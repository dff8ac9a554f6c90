"""Traces of several ranks become one, whatever one of them does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from vlmserve.engine.profiling import FollowingProfiler, Profiler
from vlmserve.executor.profile_order import ProfileOrder


def write(path: Path, **more: object) -> None:
    """A small trace."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 5.0, "dur": 1.0},
        {"ph": "s", "name": "ac2g", "pid": 7, "tid": 7, "ts": 5.0, "id": 3},
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, **more}).encode()))


def test_ranks_are_in_one_trace_and_one_that_fails_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[ProfileOrder] = []

    def tell(order: ProfileOrder) -> None:
        told.append(order)
        if order.path is None:
            write(tmp_path / f"rank-1-of-{own.name}", baseTimeNanoseconds=0)
            (tmp_path / f"rank-2-of-{own.name}").unlink()

    profiler = Profiler(others=(1, 2), tell=tell, clock=lambda: 5.0)
    own = profiler.start(tmp_path, 1, ("CPU",))
    assert [order.path for order in told] == [str(own)]
    profiler.step_done()
    assert [order.path for order in told] == [str(own), None]
    assert list(tmp_path.iterdir()) == [own], "one file"
    trace = json.loads(gzip.decompress(own.read_bytes()))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0: python", "rank 1: python"}
    [product] = [event for event in trace["traceEvents"] if event["name"] == "aten::mm"]
    assert product["ts"] == 5.0 - trace["baseTimeNanoseconds"] / 1000, "the same moment by this trace's clock"
    [arrow] = [event for event in trace["traceEvents"] if event.get("id") is not None]
    assert arrow["id"] == "1/3"
    assert "the profile has no steps of rank 2" in caplog.text


def test_a_rank_goes_on_where_it_cannot_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = FollowingProfiler(1)
    rank.obey(ProfileOrder())  # nothing is being recorded
    rank.obey(ProfileOrder(path=str(tmp_path / "gone" / "t.trace.json.gz")))
    assert "the profile of rank 1 is lost" in caplog.text
    rank.obey(ProfileOrder())
    path = tmp_path / "t.trace.json.gz"
    rank.obey(ProfileOrder(path=str(path), activities=("CPU",)))
    rank.obey(ProfileOrder())
    [written] = tmp_path.iterdir()
    assert json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
