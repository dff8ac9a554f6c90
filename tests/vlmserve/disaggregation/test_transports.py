"""Which transport KV goes by, and what NIXL does with a server that stands still."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import get_args

import numpy as np
import pytest

from tests.vlmserve.disaggregation.test_agent import FROM, KEY, NEEDS_NIXL, TO, WHOLE, pool, pool_info, running
from vlmserve.config.engine_args import EngineArgs
from vlmserve.disaggregation.links import Link
from vlmserve.disaggregation.messages import FromAgent, Pull, Pulled, ToAgent
from vlmserve.disaggregation.pools import sources
from vlmserve.engine.peers import _transports
from vlmserve_common.errors import EngineError


def test_the_best_transport_of_both_sides_is_used():
    both, old = replace(pool_info([0]), transports=("nixl", "tcp")), pool_info([0])
    assert [one.transport for one in sources(both, [both], "host")] == ["nixl"]
    assert [one.transport for one in sources(both, [old], "host")] == ["tcp"]
    assert [one.transport for one in sources(old, [both], "host")] == ["tcp"]


def test_nixl_is_asked_for_and_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    monkeypatch.delitem(sys.modules, "vlmserve.disaggregation.nixl", raising=False)
    here = pool([0], WHOLE)
    with pytest.raises(EngineError, match=r"--kv-transport nixl needs: .*\[disaggregation\]"):
        _transports(EngineArgs(model="tiny", kv_transport="nixl"), here)
    for setting in ("auto", "tcp"):
        assert _transports(EngineArgs(model="tiny", kv_transport=setting), here) == {}


def serve(pipe: Connection) -> None:
    with closing(running(pool([0], WHOLE, seed=1, states=True), "nixl")) as agent:
        agent.start()
        pipe.send(agent.info())
        pipe.recv()


@NEEDS_NIXL
def test_what_comes_too_late_is_not_written(monkeypatch):
    """Over UCX's tcp the other process answers reads, so they wait while it stands still."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pipe, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    other.start()
    mine = pool([0], WHOLE, states=True)
    with closing(running(mine, "nixl")) as agent:
        agent.start()
        found = sources(agent.info(), [pipe.recv()], "127.0.0.1")
        with closing(Link(f"tcp://127.0.0.1:{agent.port}", get_args(ToAgent), get_args(FromAgent), KEY)) as link:

            def pull(slots: np.ndarray, own_slots: np.ndarray) -> Pulled:
                link.send(Pull(ticket=1, sources=found, slots=slots, own_slots=own_slots))
                assert link.socket.poll(20_000), "no answer"
                return link.receive()

            assert pull(FROM[:1], TO[:1]) == Pulled(ticket=1)
            agent._patience_s = 0.3
            os.kill(other.pid, signal.SIGSTOP)
            assert "nothing has come" in pull(FROM[1:3], TO[1:3]).error
            os.kill(other.pid, signal.SIGCONT)
            agent._patience_s = 5.0
            assert pull(FROM[3:], TO[3:]) == Pulled(ticket=1)
    there, cuts = pool([0], WHOLE, seed=1), mine.whole()
    for part in (slice(0, 1), slice(3, None)):
        assert np.array_equal(mine.gather(cuts, TO[part]), there.gather(cuts, FROM[part]))
    late = mine.gather(cuts, TO[1:3])  # it has come before that of the last pull
    assert np.array_equal(late, pool([0], WHOLE).gather(cuts, TO[1:3]))
    pipe.send("end")
    other.join()
    assert other.exitcode == 0
