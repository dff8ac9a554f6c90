"""Processes that are to compute together meet, or know why not."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from tests.ports import free_port
from vlmserve_common.compute.shard import Shard
from vlmserve_common.errors import EngineError, RankLostError
from vlmserve_common.parallel.group import Orders, ProcessGroup, TakenAhead
from vlmserve_common.parallel.meeting import MeetingPlace, meet, split_address
from vlmserve_common.parallel.presence import Presence
from vlmserve_common.parallel.ranks import Ranks

CPU = torch.device("cpu")


def place(address: object, *, size: int = 2, seconds: float = 120.0) -> MeetingPlace:
    return MeetingPlace(address=str(address), size=size, ready_by=time.monotonic() + seconds, timeout_s=seconds)


def both(run):
    """What two ranks return, or raise."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, rank) for rank in range(2)]
        return [future.exception() or future.result() for future in futures]


def test_a_process_that_connects_to_itself_has_found_nobody(monkeypatch: pytest.MonkeyPatch):
    """The system may give the end that looks for a listener the very port where it looks."""
    port = free_port()
    connect = socket.create_connection

    def to_itself(address, timeout):
        return connect(address, timeout, source_address=address)

    monkeypatch.setattr(socket, "create_connection", to_itself)
    with pytest.raises(EngineError, match=r"found nobody there in 0\.2 s"):
        meet(place(f"127.0.0.1:{port}", seconds=0.2), 1, {})
    with socket.socket() as later:
        later.bind(("127.0.0.1", port))  # nothing is left of it


@pytest.mark.parametrize("by_address", [False, True])
def test_two_meet_add_up_hand_on_and_gather(tmp_path: Path, by_address: bool):
    there = place(f"127.0.0.1:{free_port()}" if by_address else tmp_path / "ranks")
    long = bytes(range(256)) * 100

    def run(rank: int):
        with closing(Ranks(there, Shard(rank, 2), CPU, {"version": "1"})) as ranks:
            return exchanged(ranks)

    def exchanged(ranks: Ranks):
        rank = ranks.rank
        total = ranks.group.all_reduce(torch.tensor([rank + 1.0, 2.0]))
        parts = ranks.group.gather(torch.full((1, 2), float(rank)))
        orders = []
        for order in (b"short", long):
            if rank == 0:
                ranks.orders.give(order)
            else:
                orders.append(ranks.orders.take())
        handed = ranks.group.broadcast(torch.tensor([7 - rank]))
        return total.tolist(), [part.tolist() for part in parts], ranks.smallest(5 - rank), orders, handed.item()

    first, second = both(run)
    assert first == ([3.0, 4.0], [[[0.0, 0.0]], [[1.0, 1.0]]], 4, [], 7)
    assert second == ([3.0, 4.0], [], 4, [b"short", long], 7)


def test_those_who_differ_are_all_told_how(tmp_path: Path):
    there = place(tmp_path / "ranks")
    errors = both(lambda rank: meet(there, rank, {"vlmserve's version": f"1.{rank}", "--page-size": "4"}))
    for error in errors:
        assert isinstance(error, EngineError)
        assert str(error) == "rank 1 differs from rank 0: vlmserve's version is '1.1' there, and '1.0' here"


def test_those_on_other_machines_are_told_before_the_first_one_ends():
    """The store by which they are told is in its process."""
    address = f"127.0.0.1:{free_port()}"
    code = f"""
import time
from vlmserve_common.parallel.meeting import MeetingPlace, meet
meet(MeetingPlace(address={address!r}, size=2, ready_by=time.monotonic() + 120, timeout_s=120), 0, {{"model": "a"}})
"""
    first = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(EngineError, match="rank 1 differs from rank 0: model is 'b' there, and 'a' here"):
            meet(place(address), 1, {"model": "b"})
    finally:
        first.wait()


def test_who_does_not_come_is_named_when_the_time_is_over(tmp_path: Path):
    with pytest.raises(EngineError, match=r"rank 1 of 2 did not come within 0.2 s; --startup-timeout-s allows more"):
        meet(place(tmp_path / "ranks", seconds=0.2), 0, {})
    with pytest.raises(EngineError, match=r"rank 0 of 2 did not come within 0.2 s"):
        meet(place(tmp_path / "others", seconds=0.2), 1, {})


def test_waiting_ends_when_it_is_hopeless(tmp_path: Path):
    def look():
        raise EngineError("rank 1 cannot read the checkpoint")

    with pytest.raises(EngineError, match="cannot read the checkpoint"):
        meet(place(tmp_path / "ranks"), 0, {}, look)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"--dist-init-addr is 127.0.0.1:{port}: rank 0 of 2 cannot listen"):
            meet(place(f"127.0.0.1:{port}", seconds=2.0), 0, {})


def test_an_address_where_nobody_listens_is_named():
    with pytest.raises(EngineError, match=r"rank 1 of 2 found nobody there in 0.2 s .*refused"):
        meet(place(f"127.0.0.1:{free_port()}", seconds=0.2), 1, {})


def test_where_nobody_listens_a_rank_looks_whether_waiting_is_hopeless():
    def look():
        raise EngineError("rank 0 cannot read the checkpoint")

    with pytest.raises(EngineError, match="cannot read the checkpoint"):
        meet(place(f"127.0.0.1:{free_port()}"), 1, {}, look)


@pytest.mark.parametrize("address", ["somewhere", "host:0", "host:70000", ":1", "host:x"])
def test_an_address_is_a_host_and_a_port(address: str):
    with pytest.raises(EngineError, match=f"--dist-init-addr is '{address}'; it must be HOST:PORT"):
        split_address(address)


def test_whoever_is_gone_is_noticed_at_once(tmp_path: Path):
    there = place(tmp_path / "ranks")

    def run(rank: int):
        store = meet(there, rank, {})
        group = ProcessGroup(store, "g", rank=rank, size=2, device=CPU)
        if rank == 0:
            group.close()
            return None
        return group.all_reduce(torch.ones(2))

    _, error = both(run)
    assert isinstance(error, RankLostError)
    assert str(error).startswith("rank 1 of 2 lost another one while adding up: ")


def test_a_rank_of_another_machine_that_goes_is_noticed_while_nothing_is_computed():
    """A stranger who calls, too, does not count."""
    there = place(f"127.0.0.1:{free_port()}")
    strange: list[socket.socket] = []

    def run(rank: int):
        store = meet(there, rank, {})
        if rank:
            host, port, _ = store.get("presence").decode().split()
            strange.append(socket.create_connection((host, int(port))))
            strange[0].sendall(bytes(20))
        presence = Presence(there, store, rank)
        presence.check()
        if rank:
            presence.close()
            return
        with closing(presence):
            assert wait(presence.handles, 30.0)
            presence.check()

    error, _ = both(run)
    assert isinstance(error, RankLostError)
    assert str(error) == "rank 1 of 2 is gone"


@pytest.mark.parametrize("error", [RankLostError("rank 1 of 2 lost another one"), MemoryError("no room")], ids=repr)
def test_what_goes_wrong_comes_behind_what_was_taken(error: Exception):
    """Orders that are taken before their turn."""
    given: list[torch.Tensor] = []
    Orders(lambda x: given.append(x.clone()) or x).give(b"an order")

    def exchange(x: torch.Tensor) -> torch.Tensor:
        if not given:
            raise error
        return x.copy_(given.pop(0))

    ahead = TakenAhead(Orders(exchange))
    assert ahead.take() == b"an order"
    with pytest.raises(type(error), match=str(error)):
        ahead.take()
