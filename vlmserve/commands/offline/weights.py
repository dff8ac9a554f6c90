"""Change the weights of an engine in this process, and give its memory back for a while."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Generic, TypeVar

import torch

from vlmserve.engine.weights.changing import EngineWeights
from vlmserve.frontend.weight_changes import WeightChanges
from vlmserve.ipc.control_messages import ControlRefused
from vlmserve.ipc.weight_messages import (
    MEMORY_TAGS,
    ChangeWeightsReq,
    CheckWeightsReq,
    JoinGroupReq,
    LeaveGroupReq,
    MemoryTag,
    ReceiveWeightsReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    WeightsOrder,
)
from vlmserve_common.checkpoint.weight_source import TensorPlace, WeightSource
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import BadRequestError, CheckpointError, EngineError

_R = TypeVar("_R")


class _Updates(Generic[_R]):
    """Changes to weights. The methods have SGLang's names, and vLLM's where SGLang has none.

    All raise CheckpointError for weights that do not fit, which changes nothing, and EngineError for what else fails.
    Names, shapes and dtypes of tensors are those of the checkpoint.
    """

    def update_weights_from_disk(self, model_path: str | os.PathLike[str]) -> _R:
        """Change the weights to those of a checkpoint folder."""
        return self._change(WeightSource(called=str(model_path), folder=str(model_path)))

    def update_weights_from_tensor(self, named_tensors: Mapping[str, torch.Tensor]) -> _R:
        """Change all or some weights to these tensors."""
        raise NotImplementedError

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> _R:
        """Join a group of torch.distributed in which a trainer is to send weights."""
        return self._alone(
            JoinGroupReq(
                name=group_name,
                address=master_address,
                port=master_port,
                rank_offset=rank_offset,
                world_size=world_size,
                backend=backend,
            )
        )

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
    ) -> _R:
        """Change all or some weights to tensors that the group's first member broadcasts."""
        described = zip(names, dtypes, shapes, strict=True)
        places = tuple(TensorPlace(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in described)
        return self._change(WeightSource(called=f"group {group_name}", tensors=places, group=group_name))

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> _R:
        """Leave a group."""
        return self._alone(LeaveGroupReq(name=group_name))

    def sleep(self, level: int = 1) -> _R:
        """Give all memory back to the system until `wake_up`. Level 2 forgets the weights: new ones must come then."""
        if level not in (1, 2):
            raise ValueError(f"level is {level!r}; it must be 1 (keep the weights) or 2 (forget them)")
        return self._release(discard=level == 2)

    def wake_up(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> _R:
        """Take memory again."""
        if unknown := set(tags) - set(MEMORY_TAGS):
            raise ValueError(f"there is no tag {min(unknown)!r}: {', '.join(MEMORY_TAGS)}")
        return self._resume(tags)

    def _change(self, source: WeightSource) -> _R:
        raise NotImplementedError

    def _alone(self, order: JoinGroupReq | LeaveGroupReq) -> _R:
        raise NotImplementedError

    def _release(self, *, discard: bool) -> _R:
        raise NotImplementedError

    def _resume(self, tags: Sequence[MemoryTag]) -> _R:
        raise NotImplementedError


class OfflineWeights(_Updates[None]):
    """The weights of an `LLM`; see `_Updates`."""

    def __init__(self, weights: EngineWeights) -> None:
        self._weights = weights

    def check_there(self) -> None:
        """EngineError unless the engine has its weights and its memory."""
        if not self._weights.are_there:
            raise EngineError("this LLM sleeps, or its weights are missing: wake it up, or update its weights")

    def update_weights_from_tensor(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        """See `_Updates`."""
        with tempfile.NamedTemporaryFile(prefix="vlmserve-weights-") as file:
            self._change(_written(named_tensors, file))

    def _change(self, source: WeightSource) -> None:
        self._alone(CheckWeightsReq(source=source))
        if source.group is not None:
            self._alone(ReceiveWeightsReq(source=source))
        self._alone(ChangeWeightsReq(source=source, epoch=secrets.token_hex(8)))

    def _alone(self, order: WeightsOrder) -> None:
        result = self._weights.handle(order)
        if isinstance(result, ControlRefused):
            raise (CheckpointError if result.status < 500 else EngineError)(result.message)

    def _release(self, *, discard: bool) -> None:
        self._alone(ReleaseMemoryReq(tags=MEMORY_TAGS, discard=discard))

    def _resume(self, tags: Sequence[MemoryTag]) -> None:
        self._alone(ResumeMemoryReq(tags=tuple(tags)))


class AsyncWeights(_Updates[Coroutine[Any, Any, None]]):
    """The weights of an `AsyncLLM`: all methods are awaited. A change waits for requests under way, and later ones wait
    for it, see `WeightChanges`. See `_Updates`."""

    def __init__(self, changes: WeightChanges) -> None:
        self._changes = changes

    async def update_weights_from_tensor(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        """See `_Updates`."""

        async def change() -> None:
            with tempfile.NamedTemporaryFile(prefix="vlmserve-weights-") as file:
                await self._changes.change(await asyncio.to_thread(_written, named_tensors, file))

        await self._whole(change())

    async def _change(self, source: WeightSource) -> None:
        await self._whole(self._changes.change(source))

    async def _alone(self, order: WeightsOrder) -> None:
        await self._whole(self._changes.alone(order))

    async def _release(self, *, discard: bool) -> None:
        await self._whole(self._changes.release(MEMORY_TAGS, discard=discard))

    async def _resume(self, tags: Sequence[MemoryTag]) -> None:
        await self._whole(self._changes.resume(tags))

    async def _whole(self, work: Coroutine[Any, Any, object]) -> None:
        with _own_errors():
            await self._changes.finish(work)


def _written(named_tensors: Mapping[str, torch.Tensor], file: IO[bytes]) -> WeightSource:
    """Write tensors to a file, and return them as a source."""
    places = []
    for name, tensor in named_tensors.items():
        start, dtype = file.tell(), dtype_name(tensor.dtype)
        file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        places.append(TensorPlace(name=name, dtype=dtype, shape=tuple(tensor.shape), file=file.name, start=start))
    file.flush()
    return WeightSource(called="the tensors", tensors=tuple(places))


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise errors of requests as those of weights."""
    try:
        yield
    except BadRequestError as error:
        raise (CheckpointError if error.status < 500 else EngineError)(error.message) from None
