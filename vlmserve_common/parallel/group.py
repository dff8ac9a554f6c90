"""A group of processes and its exchanges, by torch.distributed: gloo between CPUs, NCCL between GPUs. Processes that
compute on the CPU of one machine use shared memory instead.

Process groups are made as objects, not as the one group that torch keeps for a process. So several engines may live in
a process, one after another or side by side.
"""

from __future__ import annotations

import datetime
import ipaddress
import queue
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vlmserve_common.compute.communicator import Collectives, Link
from vlmserve_common.compute.graphs import Capturer, Graph
from vlmserve_common.errors import RankLostError, first_line
from vlmserve_common.parallel.shared_memory import SharedMemory, open_shared_memory

# A collective that takes longer has lost a process that neither works nor closes its connection. Waiting for orders may
# take any time: an idle process is not lost.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=300)
IDLE_TIMEOUT = datetime.timedelta(days=365)
_HEADER_BYTES, _FIRST_BYTES = 8, 4096
_MOST_SENDING = 4
"""Tensors on their way to a process that has not asked for them yet; more wait until it does."""


class ProcessGroup(Collectives, Link):
    """A group of `size` processes, of which this is number `rank`. counts: collectives so far, by name. bytes: of the
    tensors in them, by name. captured: recordings of some, which go when the group is closed.

    device: where tensors are. host: this machine's address for the group. called: this process's name in errors; by
    default its number in the group. Methods raise RankLostError if a process is gone.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        host: str = "127.0.0.1",
        timeout: datetime.timedelta = COLLECTIVE_TIMEOUT,
        called: str | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._called = called or f"rank {rank} of {size}"
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self.captured: weakref.WeakSet[_Counted] = weakref.WeakSet()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._device, self._timeout = device, timeout
        self._store = dist.PrefixStore(name, store)
        self._shared: SharedMemory | None = None
        with self._lost("meeting"):
            self._group = _make_group(self._store, rank, size, device, host, timeout)

    def share_memory(self) -> None:
        """Exchange through shared memory from now on, if possible. All processes call this."""
        if self._device.type == "cpu":
            with self._lost("sharing memory"):
                self._shared = open_shared_memory(self._store, self.rank, self.size, self._timeout)

    def in_operators(self) -> ProcessGroup | None:
        return None if self._shared is None else self

    @property
    def address(self) -> int:
        """See `Sums`; once memory is shared."""
        assert self._shared is not None
        return self._shared.address

    def noted(self, lost: int, sums: int, nbytes: int) -> None:
        """See `Sums`."""
        self.counts["all_reduce"] += sums
        self.bytes["all_reduce"] += sums * nbytes
        with self._lost("adding up"):
            SharedMemory.check(lost)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_reduce", x)
        with self._lost("adding up"):
            if self._shared is not None and self._shared.can_add(x):
                self._shared.all_reduce(x)
            else:
                self._group.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._count("gather", x)
        if self._shared is not None:
            with self._lost("gathering"):
                return self._shared.gather(x)
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        with self._lost("gathering"):
            self._group.gather([parts] if parts else [], [x], options).wait()
        return parts

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.size * len(x), *x.shape[1:]))
        self._count("all_gather", out)
        with self._lost("gathering"):
            self._group._allgather_base(out, x).wait()
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self._count("reduce_scatter", x)
        out = x.new_empty((len(x) // self.size, *x.shape[1:]))
        with self._lost("adding up"):
            self._group._reduce_scatter_base(out, x).wait()
        return out

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        self._count("all_to_all", x)
        out = x.new_empty((sum(received), *x.shape[1:]))
        with self._lost("exchanging"):
            self._group.alltoall_base(out, x, list(received), list(sent)).wait()
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy the first process's x to all processes, into x's memory; x is contiguous."""
        self._count("broadcast", x)
        with self._lost("handing on"):
            if self._shared is not None:
                self._shared.broadcast(x)
            else:
                self._group.broadcast(x, 0).wait()
        return x

    def send(self, x: torch.Tensor) -> None:
        """Send x from the first to the second process of a group of two."""
        self._count("send", x)
        with self._lost("sending"):
            if len(self._sending) == _MOST_SENDING:
                self._sending.popleft()[0].wait()
            x = x.contiguous()
            self._sending.append((self._group.send([x], 1, 0), x))

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Receive x at the second process of a group of two: see `Link`; x is contiguous."""
        self._count("receive", x)
        with self._lost("receiving"):
            self._group.recv([x], 0, 0).wait()
        return x

    def hand_on(self, x: torch.Tensor) -> torch.Tensor:
        """Send or receive x, depending on the rank, and return it."""
        if self.rank:
            return self.receive(x)
        self.send(x)
        return x

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers that all processes call this with."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        with self._lost("comparing"):
            self._group.allreduce([value], options).wait()
        return int(value.item())

    def close(self) -> None:
        """Close the connections; the other processes see that this one is gone."""
        for captured in self.captured:  # NCCL would wait until they are gone
            captured.drop()
        self._group = None
        if self._shared is not None:
            self._shared.close()

    def _count(self, name: str, x: torch.Tensor) -> None:
        self.counts[name] += 1
        self.bytes[name] += x.nbytes

    @contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise RankLostError(f"{self._called} lost another one while {doing}: {first_line(error)}") from error


class CountingCapturer(Capturer):
    """A `Capturer` whose graphs count their recorded collectives in the group at each replay. No Python runs then that
    could count them."""

    def __init__(self, capturer: Capturer, group: ProcessGroup) -> None:
        self._capturer, self._group = capturer, group

    def capture(self, run: Callable[[], None]) -> Graph:
        group = self._group
        counts, sizes = Counter[str](), Counter[str]()

        def counted() -> None:
            nonlocal counts, sizes
            before = group.counts.copy(), group.bytes.copy()
            run()
            counts, sizes = group.counts - before[0], group.bytes - before[1]

        graph = self._capturer.capture(counted)
        # the last ones were recorded, and not done
        group.counts.subtract(counts)
        group.bytes.subtract(sizes)
        counting = _Counted(graph, group, counts, sizes)
        group.captured.add(counting)
        return counting


class _Counted(Graph):
    def __init__(self, graph: Graph, group: ProcessGroup, counts: Counter[str], sizes: Counter[str]) -> None:
        self._graph: Graph | None = graph
        self._group, self._counts, self._sizes = group, counts, sizes

    def drop(self) -> None:
        """Drop the recording; it cannot be replayed any more."""
        self._graph = None

    def replay(self) -> None:
        assert self._graph is not None, "the group is closed"
        self._graph.replay()
        self._group.counts.update(self._counts)
        self._group.bytes.update(self._sizes)


class Orders:
    """Sends bytes from the first process to all other processes, in order. Most orders take one exchange, long ones
    two.

    exchange: `broadcast` or `hand_on` of a group of the CPU.
    """

    def __init__(self, exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._exchange = exchange

    def give(self, order: bytes) -> None:
        """Send an order, at the first process."""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        first[:_HEADER_BYTES].view(torch.int64)[0] = len(order)
        body = torch.frombuffer(bytearray(order), dtype=torch.uint8)
        head = body[: _FIRST_BYTES - _HEADER_BYTES]
        first[_HEADER_BYTES : _HEADER_BYTES + len(head)] = head
        self._exchange(first)
        if len(body) > len(head):
            self._exchange(body[len(head) :].clone())

    def take(self) -> bytes:
        """Wait for the next order and return it, at another process."""
        first = self._exchange(torch.zeros(_FIRST_BYTES, dtype=torch.uint8))
        size = int(first[:_HEADER_BYTES].view(torch.int64)[0])
        order = bytes(first[_HEADER_BYTES : _HEADER_BYTES + size].numpy())
        if len(order) < size:
            order += bytes(self._exchange(torch.empty(size - len(order), dtype=torch.uint8)).numpy())
        return order


class TakenAhead:
    """Takes orders in a thread of its own. Giving an order waits until all ranks have taken it; this lets a stage of a
    pipeline begin the next step while a later stage computes."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._taken: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._take_all, name="orders", daemon=True).start()

    def take(self) -> bytes:
        """Return the next order; wait for it."""
        taken = self._taken.get()
        if isinstance(taken, Exception):
            raise taken
        return taken

    def _take_all(self) -> None:
        try:
            while True:
                self._taken.put(self._orders.take())
        except Exception as error:  # of any kind: the taker would wait for good
            self._taken.put(error)


def address_towards(host: str) -> str:
    """Return this machine's own address on the way to another machine. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host and ipaddress.ip_address(host).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _make_group(
    store: dist.Store, rank: int, size: int, device: torch.device, host: str, timeout: datetime.timedelta
) -> Any:
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)
