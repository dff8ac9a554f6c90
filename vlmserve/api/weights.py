"""Endpoints with which trainers change the weights of a running server, and give its memory back for a while. Names and
bodies are SGLang's (`/sleep` and `/wake_up`: vLLM's), but nothing is ever unpickled: tensors come as data."""

from __future__ import annotations

import base64
import binascii
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.control import ControlApi
from vlmserve.api.openapi import BODY_ERRORS, ENGINE_ERRORS, operation
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.protocol import StrictModel
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve.frontend.weight_changes import WeightChanges
from vlmserve.ipc.weight_messages import (
    MEMORY_TAGS,
    JoinGroupReq,
    LeaveGroupReq,
    MemoryTag,
    WeightsDone,
    WeightsOrder,
)
from vlmserve_common.checkpoint.weight_source import TensorPlace, WeightSource
from vlmserve_common.errors import BadRequestError

_T = TypeVar("_T")
_LONGEST_S = 3600.0
"""The time that an engine may take for one order: weights of hundreds of gigabytes come from a disk."""
_SHARED_MEMORY = Path("/dev/shm")
_GROUP = "weight_update_group"
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Folder = Annotated[str, Field(min_length=1, max_length=4096)]
_MOST = 2**48  # of bytes and elements
_Shape = list[Annotated[int, Field(ge=0, le=_MOST)]]
_ERRORS = (*BODY_ERRORS, 403, *ENGINE_ERRORS)


class _UpdateBody(StrictModel):
    """Fields that all updates share. flush_cache: without effect, as what was cached is never found again. Further
    fields that trainers send say nothing here."""

    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    is_async: Literal[False] = False
    token_step: int | None = None
    torch_empty_cache: bool | None = None
    keep_pause: bool | None = None
    recapture_cuda_graph: bool | None = None


class DiskBody(_UpdateBody):
    """The body of POST /update_weights_from_disk."""

    model_path: _Folder
    load_format: Literal["auto", "safetensors"] | None = None


class SharedMemory(StrictModel):
    """A POSIX segment. name: without the slash. size: its bytes."""

    name: Annotated[str, Field(pattern=r"^[^/\x00]{1,255}$")]
    size: Annotated[int, Field(ge=0, le=_MOST)]


class SharedTensor(StrictModel):
    """A tensor in it. offset: in bytes."""

    name: _Name
    dtype: _Name
    shape: _Shape
    offset: Annotated[int, Field(ge=0, le=_MOST, multiple_of=64)]


class TensorBody(_UpdateBody):
    """The body of POST /update_weights_from_tensor. serialized_named_tensors: whole safetensors files in base64; one
    for all ranks, or the same for each. shared_memory, tensors: where tensors lie instead."""

    load_format: Literal["safetensors", "shared_memory"]
    serialized_named_tensors: list[str] | None = None
    shared_memory: SharedMemory | None = None
    tensors: list[SharedTensor] | None = None


class JoinBody(StrictModel):
    """The body of POST /init_weights_update_group."""

    master_address: _Name
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=65536)]
    group_name: _Name = _GROUP
    backend: Literal["gloo", "nccl"] = "nccl"


class DistributedBody(_UpdateBody):
    """The body of POST /update_weights_from_distributed."""

    names: list[_Name]
    dtypes: list[_Name]
    shapes: list[_Shape]
    group_name: _Name = _GROUP
    load_format: None = None


class LeaveBody(StrictModel):
    """The body of POST /destroy_weights_update_group."""

    group_name: _Name = _GROUP


class MemoryBody(StrictModel):
    """The body of POST /release_memory_occupation and /resume_memory_occupation. No tags: all. cuda_graph is taken, and
    nothing of the kind is released."""

    tags: list[MemoryTag | Literal["cuda_graph"]] | None = None

    @property
    def known(self) -> list[MemoryTag]:
        """The kinds of memory that it is about."""
        return [tag for tag in MEMORY_TAGS if self.tags is None or tag in self.tags]


class Changed(TypedDict):
    """What was done. num_paused_requests: that go on with the new weights. bytes: of tensors, or of memory."""

    success: bool
    message: str
    num_paused_requests: NotRequired[int]
    weight_version: NotRequired[str]
    bytes: NotRequired[int]


class WeightVersion(TypedDict):
    weight_version: str


class Sleeping(TypedDict):
    is_sleeping: bool


class WeightsApi:
    """The endpoints of trainers."""

    def __init__(self, manager: TokenizerManager, operators: ControlApi, settings: ServerSettings) -> None:
        self._manager, self._settings = manager, settings
        self._changes = WeightChanges(
            manager,
            operators.changes,
            order=lambda order: operators.ask(order, WeightsDone, _LONGEST_S),
            end_inside=lambda: operators.end_requests(inside=True),
            is_paused=lambda: operators.paused,
        )

    @operation(
        *("POST", "/update_weights_from_disk", "updateWeightsFromDisk", "Operators"),
        request=DiskBody,
        example={"model_path": "/checkpoints/step-100", "weight_version": "step-100"},
        answer=Changed,
        errors=_ERRORS,
    )
    async def from_disk(self, request: Request) -> Response:
        """Change the weights to those of a checkpoint folder."""
        body = await self._body(request, DiskBody)
        return await self._finished(self._change(body, WeightSource(called=body.model_path, folder=body.model_path)))

    @operation(
        *("POST", "/update_weights_from_tensor", "updateWeightsFromTensor", "Operators"),
        request=TensorBody,
        example={"load_format": "safetensors", "serialized_named_tensors": ["..."], "weight_version": "step-100"},
        answer=Changed,
        errors=_ERRORS,
    )
    async def from_tensor(self, request: Request) -> Response:
        """Change all or some weights to tensors that come as safetensors or in shared memory."""
        body = await self._body(request, TensorBody)
        return await self._finished(self._from_tensor(body))

    @operation(
        *("POST", "/init_weights_update_group", "initWeightsUpdateGroup", "Operators"),
        request=JoinBody,
        example={"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2},
        answer=Changed,
        errors=_ERRORS,
    )
    async def join(self, request: Request) -> Response:
        """Join a group of torch.distributed in which a trainer is to send weights."""
        body = await self._body(request, JoinBody)
        order = JoinGroupReq(
            name=body.group_name,
            address=body.master_address,
            port=body.master_port,
            rank_offset=body.rank_offset,
            world_size=body.world_size,
            backend=body.backend,
        )
        return await self._finished(self._alone(order, f"joined the group {body.group_name!r}"))

    @operation(
        *("POST", "/update_weights_from_distributed", "updateWeightsFromDistributed", "Operators"),
        request=DistributedBody,
        example={"names": ["lm_head.weight"], "dtypes": ["bfloat16"], "shapes": [[151936, 2048]]},
        answer=Changed,
        errors=_ERRORS,
    )
    async def from_group(self, request: Request) -> Response:
        """Change all or some weights to tensors that a group's first member broadcasts."""
        body = await self._body(request, DistributedBody)
        if not len(body.names) == len(body.dtypes) == len(body.shapes) > 0:
            raise BadRequestError(
                f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes: there must be one "
                "of each for every tensor"
            )
        described = zip(body.names, body.dtypes, body.shapes, strict=True)
        places = tuple(
            TensorPlace(name=name, dtype=dtype.removeprefix("torch."), shape=tuple(shape))
            for name, dtype, shape in described
        )
        source = WeightSource(called=f"group {body.group_name}", tensors=places, group=body.group_name)
        return await self._finished(self._change(body, source))

    @operation(
        *("POST", "/destroy_weights_update_group", "destroyWeightsUpdateGroup", "Operators"),
        request=LeaveBody,
        example={"group_name": _GROUP},
        needs_body=False,
        answer=Changed,
        errors=_ERRORS,
    )
    async def leave(self, request: Request) -> Response:
        """Leave a group in which a trainer sent weights."""
        name = (await self._body(request, LeaveBody)).group_name
        return await self._finished(self._alone(LeaveGroupReq(name=name), f"left the group {name!r}"))

    @operation("GET", "/get_weight_version", "getWeightVersion", "Operators", answer=WeightVersion)
    async def weight_version(self) -> WeightVersion:
        """Return the name that a trainer gave the weights."""
        return {"weight_version": self._manager.weight_version}

    @operation(
        *("POST", "/release_memory_occupation", "releaseMemoryOccupation", "Operators"),
        request=MemoryBody,
        example={"tags": ["kv_cache"]},
        needs_body=False,
        answer=Changed,
        errors=_ERRORS,
    )
    async def release(self, request: Request) -> Response:
        """Give the memory of weights or of the cache back to the system. Requests wait until it is resumed."""
        return await self._finished(self._release((await self._body(request, MemoryBody)).known))

    @operation(
        *("POST", "/resume_memory_occupation", "resumeMemoryOccupation", "Operators"),
        request=MemoryBody,
        example={"tags": ["kv_cache"]},
        needs_body=False,
        answer=Changed,
        errors=_ERRORS,
    )
    async def resume(self, request: Request) -> Response:
        """Take released memory again, with the weights that were there."""
        return await self._finished(self._resume((await self._body(request, MemoryBody)).known))

    @operation(
        *("POST", "/sleep", "sleep", "Operators"),
        query={"level": {"type": "integer", "enum": [1, 2], "default": 1}},
        answer=Changed,
        errors=(*_ERRORS, 409),
    )
    async def sleep(self, request: Request) -> Response:
        """Give all memory back to the system until /wake_up. Level 2 forgets the weights: new ones must come then."""
        self._check_sleeps()
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise BadRequestError(
                f"level is {level!r}: it must be 1 (keep the weights) or 2 (forget them)", param="level"
            )
        return await self._finished(self._release(MEMORY_TAGS, discard=level == "2"))

    @operation(
        *("POST", "/wake_up", "wakeUp", "Operators"),
        query={"tags": {"type": "array", "items": {"type": "string", "enum": list(MEMORY_TAGS)}}},
        answer=Changed,
        errors=(*_ERRORS, 409),
    )
    async def wake_up(self, request: Request) -> Response:
        """Take the memory again that was given back by /sleep."""
        self._check_sleeps()
        given = request.query_params.getlist("tags")
        tags = [tag for tag in MEMORY_TAGS if tag in given or not given]
        if unknown := set(given) - set(MEMORY_TAGS):
            raise BadRequestError(f"there is no tag {min(unknown)!r}: {', '.join(MEMORY_TAGS)}", param="tags")
        return await self._finished(self._resume(tags))

    @operation("GET", "/is_sleeping", "isSleeping", "Operators", answer=Sleeping)
    async def is_sleeping(self) -> Sleeping:
        """Tell whether any memory is given back."""
        return {"is_sleeping": bool(self._changes.released)}

    async def _change(self, body: _UpdateBody, source: WeightSource) -> Changed:
        done = await self._changes.change(source, abort=body.abort_all_requests)
        self._manager.weight_version = body.weight_version or self._manager.weight_version
        return {
            "success": True,
            "message": f"the weights are those of {source.called}",
            "num_paused_requests": self._manager.door.inside,
            "weight_version": self._manager.weight_version,
            "bytes": done.nbytes,
        }

    async def _from_tensor(self, body: TensorBody) -> Changed:
        if body.load_format == "shared_memory":
            return await self._change(body, _shared(body))
        with _as_file(body.serialized_named_tensors or [], ranks=self._settings.engine.tp_size) as source:
            return await self._change(body, source)

    async def _alone(self, order: WeightsOrder, done: str) -> Changed:
        await self._changes.alone(order)
        return {"success": True, "message": done}

    async def _release(self, tags: Sequence[MemoryTag], *, discard: bool = False) -> Changed:
        done = await self._changes.release(tags, discard=discard)
        return {"success": True, "message": f"released: {', '.join(tags)}", "bytes": done.nbytes}

    async def _resume(self, tags: Sequence[MemoryTag]) -> Changed:
        done = await self._changes.resume(tags)
        return {"success": True, "message": f"resumed: {', '.join(tags)}", "bytes": done.nbytes}

    async def _finished(self, work: Coroutine[Any, Any, Changed]) -> Response:
        """Answer with the result of some work, which goes on if the client leaves."""
        return JSONResponse(await self._changes.finish(work))

    def _check_operator(self) -> None:
        """Refuse clients who have a key, where operators have none of their own: folders are read for whoever asks, and
        hosts are connected to."""
        settings = self._settings
        if settings.admin_api_key is None and (settings.api_key is not None or settings.api_key_file is not None):
            message = "clients may not change weights: operators need a key of their own (setting --admin-api-key)"
            raise BadRequestError(message, status=403)

    def _check_sleeps(self) -> None:
        self._check_operator()
        if not self._settings.engine.enable_sleep_mode:
            raise BadRequestError("this server does not sleep (setting --enable-sleep-mode)", status=409)

    async def _body(self, request: Request, model: type[_T]) -> _T:
        self._check_operator()
        return await read_body(request, model, self._settings, if_empty=b"{}")  # type: ignore[type-var]


def _shared(body: TensorBody) -> WeightSource:
    """Return the tensors of a segment of shared memory. Raises BadRequestError."""
    if body.shared_memory is None or not body.tensors:
        raise BadRequestError("load_format shared_memory needs shared_memory and tensors", param="tensors")
    path = _SHARED_MEMORY / body.shared_memory.name
    if not path.is_file() or path.stat().st_size < body.shared_memory.size:
        raise BadRequestError(
            f"there is no shared memory {body.shared_memory.name!r} of {body.shared_memory.size} bytes",
            param="shared_memory",
        )
    places = tuple(
        TensorPlace(
            name=one.name,
            dtype=one.dtype.removeprefix("torch."),
            shape=tuple(one.shape),
            file=str(path),
            start=one.offset,
        )
        for one in body.tensors
    )
    return WeightSource(called=f"shared memory {body.shared_memory.name}", tensors=places)


@contextmanager
def _as_file(entries: Sequence[str], *, ranks: int) -> Iterator[WeightSource]:
    """Keep a safetensors file in base64 as a file for a while. Raises BadRequestError."""
    if len(entries) not in (1, ranks) or len(set(entries)) > 1:
        raise BadRequestError(
            f"there are {len(entries)} entries; there must be one, or the same for each of {ranks} ranks: every entry "
            "has whole tensors",
            param="serialized_named_tensors",
        )
    try:
        data = base64.b64decode(entries[0], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequestError(f"this is no base64: {error}", param="serialized_named_tensors") from None
    with tempfile.NamedTemporaryFile(prefix="vlmserve-weights-") as file:
        file.write(data)
        file.flush()
        yield WeightSource(called="serialized_named_tensors", file=file.name)
