"""Alternatives take turns, a target is met from its own side, and who takes CPU time meanwhile is known."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from vlmserve.commands.bench import processes as watching
from vlmserve.commands.bench.figures import Measure, Spread, in_turns, ratios
from vlmserve.commands.bench.processes import CpuWatch, server_pid


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


TICK = os.sysconf("SC_CLK_TCK")


def test_the_process_that_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert server_pid(f"http://127.0.0.1:{port}") is None
        listener.listen()
        assert server_pid(f"http://localhost:{port}/v1") == os.getpid()
        # a child that has the socket, too, is not the server's first process
        words = [sys.executable, "-c", "input()"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]) as child:
            assert server_pid(f"http://127.0.0.1:{port}") == os.getpid()
            child.communicate(b"\n")
    assert server_pid("http://example.com:80") is None


def test_cores_of_servers_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server (10) with a child's child, another (20), this process, and somebody else's (30)."""
    me = os.getpid()
    seconds = {10: 5.0, 11: 1.0, 12: 0.0, 20: 7.0, me: 100.0, 30: 3.0}
    parents = {10: me, 11: 10, 12: 11, 20: 1, me: 1, 30: 1}
    machine, now = [1000.0], [50.0]

    def processes() -> dict[int, list[str]]:
        return {
            pid: ["S", str(parents[pid]), *"0" * 9, str(round(seconds[pid] * TICK)), "0", "0", "0"] for pid in seconds
        }

    monkeypatch.setattr(watching, "_processes", processes)
    monkeypatch.setattr(watching, "_machine_seconds", lambda: machine[0])
    monkeypatch.setattr(watching.time, "perf_counter", lambda: now[0])
    watch = CpuWatch([10, 20])
    now[0] += 10
    seconds |= {10: 6.0, 12: 9.0, 20: 8.0, me: 102.0, 30: 8.0}
    machine[0] += 18
    assert watch.cores() == (pytest.approx({10: 1.0, 20: 0.1}), pytest.approx(0.5))
    del seconds[20]  # it has ended: that is no reason to fail
    assert watch.cores()[0][20] == 0
