"""Groups of torch.distributed in which a trainer sends weights.

A group is made as trainers make theirs, beside any default group: by a rendezvous at the trainer's TCP store, with the
group's name in front of its keys. Number 0 is the trainer, which broadcasts tensors one by one.

Tensors are kept in a file until all have come, so a trainer that dies leaves the old weights as they are, and memory
does not hold the weights twice: the system may write the file's pages to the disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from vlmserve.ipc.weight_messages import JoinGroupReq
from vlmserve_common.checkpoint.given import dtype_of
from vlmserve_common.checkpoint.weight_source import TensorPlace, WeightSource
from vlmserve_common.errors import CheckpointError, EngineError

_TIMEOUT_S = 60.0
"""The time in which a group must meet, and the longest wait for a tensor."""
_ALIGNED = 64


class TrainerGroups:
    """The groups that a process is in, and tensors that have come. number, alive: see `RankWeights`."""

    def __init__(self, device: torch.device, number: int, alive: Callable[[], object]) -> None:
        self._device, self._number, self._alive = device, number, alive
        self._groups: dict[str, tuple[Any, dist.Store]] = {}  # a store has to outlive its group
        self._file: IO[bytes] | None = None
        self._received: tuple[TensorPlace, ...] = ()

    def join(self, order: JoinGroupReq) -> None:
        """Meet the others. EngineError if they do not come in time."""
        if order.name in self._groups:
            raise CheckpointError(f"there is a group {order.name!r} already: destroy it first")
        rank, wait = order.rank_offset + self._number, timedelta(seconds=_TIMEOUT_S)
        if not 0 < rank < order.world_size:
            raise CheckpointError(
                f"this process would be number {rank} of {order.world_size} (rank_offset {order.rank_offset})"
            )
        try:
            url = f"tcp://{order.address}:{order.port}"
            store, rank, size = next(c10d.rendezvous(url, rank, order.world_size, timeout=wait))
            store.set_timeout(wait)
            group, _ = c10d._new_process_group_helper(
                size,
                rank,
                [],
                c10d.Backend(order.backend),
                c10d.PrefixStore(order.name, store),
                group_name=c10d.GroupName(order.name),
                timeout=wait,
            )
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"the group {order.name!r} at {order.address}:{order.port} did not meet: {error}"
            ) from error
        c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}
        self._groups[order.name] = group, store

    def check(self, name: str) -> None:
        """CheckpointError unless this process is in a group of that name."""
        if name not in self._groups:
            raise CheckpointError(f"there is no group {name!r}: ask /init_weights_update_group for it first")

    def leave(self, name: str) -> None:
        """Leave a group. CheckpointError if there is none of that name."""
        self.check(name)
        group, _ = self._groups.pop(name)
        dist.destroy_process_group(group)

    def receive(self, source: WeightSource) -> int:
        """Take the tensors of a source, and return their bytes. EngineError if the trainer is gone."""
        assert source.group is not None
        self.check(source.group)
        group, _ = self._groups[source.group]
        self.forget()
        backend = dist.get_backend(group)
        device = torch.device("cpu") if backend == "gloo" else self._device
        places = list[TensorPlace]()
        file = tempfile.NamedTemporaryFile(prefix="vlmserve-weights-")  # noqa: SIM115 -- it stays until `forget`
        try:
            for place in source.tensors:
                tensor = torch.empty(place.shape, dtype=dtype_of(place), device=device)
                dist.broadcast(tensor, 0, group=group)
                self._alive()
                file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
                start = file.tell()
                file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
                places.append(
                    TensorPlace(name=place.name, dtype=place.dtype, shape=place.shape, file=file.name, start=start)
                )
            file.flush()
        except (RuntimeError, OSError) as error:
            file.close()
            got = f"{len(places)} of {len(source.tensors)} tensors came"
            raise EngineError(f"the group {source.group!r} broke off, and {got}: {error}") from error
        self._file, self._received = file, tuple(places)
        return os.fstat(file.fileno()).st_size

    def take(self) -> tuple[TensorPlace, ...]:
        """Return the tensors of the last `receive`; their file is there until `forget`."""
        return self._received

    def forget(self) -> None:
        """Delete the file of tensors that came."""
        if self._file is not None:
            self._file.close()
        self._file, self._received = None, ()
