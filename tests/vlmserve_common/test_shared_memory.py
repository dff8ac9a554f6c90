"""Ranks of one machine exchange through memory that they share, and others through sockets, with the same results."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vlmserve_common.errors import RankLostError
from vlmserve_common.kernels.library import activate
from vlmserve_common.parallel import shared_memory
from vlmserve_common.parallel.group import IDLE_TIMEOUT, Orders, ProcessGroup

CPU = torch.device("cpu")
LENGTHS = (1, 17, 300_001)  # the last one takes several slots


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    assert activate("auto", threads=1).startswith("operators for")
    yield
    activate("off", threads=1)


def of_ranks(tmp_path: Path, size: int, run) -> list:
    """What run(group) returns, or raises, at every rank."""

    def as_rank(rank: int):
        store = dist.FileStore(str(tmp_path / "store"), size)
        with closing(ProcessGroup(store, "g", rank=rank, size=size, device=CPU)) as group:
            group.share_memory()
            return run(group)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(as_rank, rank) for rank in range(size)]
        return [future.exception() or future.result() for future in futures]


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_are_the_same_bits_at_all(tmp_path: Path, size: int, dtype: torch.dtype):
    def run(group: ProcessGroup):
        assert group._shared is not None
        return [group.all_reduce(values(group.rank, length, dtype)) for length in LENGTHS * 3]

    found = of_ranks(tmp_path, size, run)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for place, length in enumerate(LENGTHS * 3):
        total = torch.zeros(length, dtype=wide)
        for rank in range(size):
            total += values(rank, length, dtype).to(wide)
        assert torch.equal(found[0][place], total.to(dtype)) or dtype == torch.float64
        assert torch.allclose(found[0][place], total.to(dtype))
        assert all(torch.equal(one[place], found[0][place]) for one in found)


def test_what_is_handed_on_and_gathered_comes_as_it_was(tmp_path: Path):
    """In any mixture; the first one runs ahead of the others."""
    order = bytes(range(256)) * 5000

    def run(group: ProcessGroup):
        found = []
        orders = Orders(group.broadcast)
        for turn in range(20):
            found.append(group.broadcast(values(group.rank + turn, LENGTHS[turn % 3], torch.float32)))
            found += group.gather(values(group.rank, LENGTHS[turn % 3], torch.bfloat16).view(1, -1))
            if group.rank == 0:
                orders.give(order[turn:])
            else:
                assert orders.take() == order[turn:]
        return found

    found = of_ranks(tmp_path, 3, run)
    for turn in range(20):
        sent = values(turn, LENGTHS[turn % 3], torch.float32)
        assert torch.equal(found[0][4 * turn], sent)
        assert torch.equal(found[1][turn], sent)
        assert torch.equal(found[2][turn], sent)
        for rank in range(3):
            gathered = found[0][4 * turn + 1 + rank]
            assert torch.equal(gathered[0], values(rank, LENGTHS[turn % 3], torch.bfloat16))


def test_who_closes_is_noticed(tmp_path: Path):
    def run(group: ProcessGroup):
        return group.all_reduce(torch.ones(3)) if group.rank else None

    _, error = of_ranks(tmp_path, 2, run)
    assert isinstance(error, RankLostError)
    assert str(error) == "rank 1 of 2 lost another one while adding up: number 0 of them is gone"


def test_a_process_that_dies_is_noticed_by_who_sleeps(tmp_path: Path):
    work = f"""
import os, torch, torch.distributed as dist
from vlmserve_common.kernels.library import activate
from vlmserve_common.parallel.group import ProcessGroup
activate("auto", threads=1)
group = ProcessGroup(dist.FileStore({str(tmp_path / "store")!r}, 2), "g", rank=1, size=2, device=torch.device("cpu"))
group.share_memory()
group.all_reduce(torch.ones(3))
os._exit(0)
"""
    process = subprocess.Popen([sys.executable, "-c", work], env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        group = ProcessGroup(dist.FileStore(str(tmp_path / "store"), 2), "g", rank=0, size=2, device=CPU)
        group.share_memory()
        assert group.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        with pytest.raises(RankLostError, match="number 1 of them is gone"):  # a zombie, as nobody has waited for it
            group.all_reduce(torch.ones(3))
    finally:
        process.wait()


def test_sockets_do_where_memory_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file of that name is there, and is another one."""
    monkeypatch.setattr(shared_memory.secrets, "token_bytes", lambda size: bytes(size))
    find = shared_memory._find

    def on_another_machine(store: dist.Store, size: int):
        there = store.get("shared").decode().replace("00", "ff")
        store.set("shared", there)
        return find(store, size)

    monkeypatch.setattr(shared_memory, "_find", on_another_machine)

    def run(group: ProcessGroup):
        assert group._shared is None
        return group.all_reduce(torch.ones(2)).tolist()

    assert of_ranks(tmp_path, 2, run) == [[2.0, 2.0]] * 2


def test_sockets_do_where_a_process_cannot_see_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Linux before 5.3, or a container that forbids it."""

    def forbidden(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shared_memory.os, "pidfd_open", forbidden)

    def run(group: ProcessGroup):
        assert group._shared is None
        return group.all_reduce(torch.ones(2)).tolist()

    assert of_ranks(tmp_path, 2, run) == [[2.0, 2.0]] * 2


def test_orders_may_be_longer_in_coming_than_the_milliseconds_of_32_bits(tmp_path: Path):
    def as_rank(rank: int):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        with closing(ProcessGroup(store, "g", rank=rank, size=2, device=CPU, timeout=IDLE_TIMEOUT)) as group:
            group.share_memory()
            if rank == 0:
                time.sleep(0.3)  # longer than between looks
            group.broadcast(torch.zeros(1))
            return group._shared._group.timeout_ms

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(as_rank, range(2))) == [365 * 24 * 3600 * 1000] * 2
