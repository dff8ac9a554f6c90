"""Endpoints with which operators control a running server, under SGLang's names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypeVar, cast

from fastapi import Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.errors import Error, error_body
from vlmserve.api.openapi import BODY_ERRORS, ENGINE_ERRORS, ID_ERRORS, operation
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.protocol import StrictModel
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve.ipc.control_messages import (
    AbortRequestsReq,
    Activity,
    ContinueReq,
    ControlRefused,
    ControlRequest,
    ControlResult,
    EngineState,
    FlushCacheReq,
    GetServerInfoReq,
    PauseReq,
    ProfileResult,
    ServerInfo,
    StartProfileReq,
    StopProfileReq,
)
from vlmserve.ipc.messages import SchedulerStats
from vlmserve_common.errors import BadRequestError, EngineUnavailableError
from vlmserve_common.version import __version__

AskEngine: TypeAlias = Callable[[ControlRequest], Awaitable[ControlResult]]
"""Sends a control message to the engine, and brings its answer."""


async def no_engine(_: ControlRequest) -> ControlResult:
    """Refuse every control message: there is no engine that takes them."""
    return ControlRefused(message="this server's engine takes no control messages", status=501)


# A message is taken between two steps; on a CPU one may take long, and so does writing a profile.
ANSWER_S = 60.0
_MOST_STEPS = 10**6  # hours of them
_SECRETS = frozenset(("api_key", "admin_api_key", "database_url", "file_store_url", "peer_key", "embedder_api_key"))
_T = TypeVar("_T")


class AbortBody(StrictModel):
    """The body of POST /abort_request. An empty rid is none."""

    rid: str | None = None
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> AbortBody:
        if bool(self.rid) == bool(self.abort_all):
            raise PydanticCustomError("abort_what", "needs either a rid or abort_all: true")
        return self


class PauseBody(StrictModel):
    """The body of POST /pause_generation. What becomes of requests under way: they are aborted; or they stay, give
    their memory back and are computed again (retract) or keep it (in_place)."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ProfileBody(StrictModel):
    """The body of POST /start_profile."""

    num_steps: Annotated[int | None, Field(ge=1, le=_MOST_STEPS)] = None
    activities: list[Activity] | None = None


class ServerState(TypedDict):
    """The state of a server. settings: without secrets. scheduler: the scheduler's figures.

    urls: where other servers order work from this one. defaults: of fields that a request leaves out; null where the
    request decides.
    """

    version: str
    model: str
    max_model_len: int
    device: str
    dtype: str
    urls: NotRequired[list[str]]
    uptime_s: float
    paused: bool
    profiling: bool
    num_pending: int
    defaults: dict[str, float | None]
    scheduler: dict[str, Any]
    replicas: NotRequired[list[dict[str, Any]]]
    settings: dict[str, Any]


class FlushedCache(TypedDict):
    flushed_tokens: int


class CacheInUse(Error):
    """The answer while requests keep their part of the cache. tokens: how many were forgotten."""

    tokens: int
    num_running_reqs: int
    num_waiting_reqs: int


class PauseState(TypedDict):
    paused: bool
    num_running_reqs: int
    num_waiting_reqs: int


class ProfileTrace(TypedDict):
    """A recording. path: the file of the trace. num_steps: null if the recording lasts until /stop_profile."""

    path: str
    num_steps: int | None


class AbortedRequests(TypedDict):
    """The ended requests. aborted: their ids."""

    aborted: list[str]


class ControlApi:
    """The endpoints of operators. paused: the engine begins no step, as far as this process knows. changes: held by
    whoever pauses the engine or changes its weights."""

    def __init__(self, manager: TokenizerManager, ask: AskEngine, settings: ServerSettings, model_name: str) -> None:
        self.paused = False
        self.changes = asyncio.Lock()
        self._manager = manager
        self._send = ask
        self._settings = settings
        self._model_name = model_name
        self._started = time.monotonic()

    @operation(
        *("POST", "/flush_cache", "flushCache", "Operators"),
        answer=FlushedCache,
        errors=(409, *ENGINE_ERRORS),
        conflict=CacheInUse,
    )
    async def flush_cache(self) -> Response:
        """Forget the cached prefixes that no request uses. The answer is 409 while there are requests."""
        result = await self.ask(FlushCacheReq(), EngineState)
        waiting = 0 if result.paused else result.num_waiting_reqs  # paused, they have nothing
        if not result.num_running_reqs + waiting:
            return JSONResponse({"flushed_tokens": result.flushed})
        message = (
            f"{result.num_running_reqs} requests are running and {result.num_waiting_reqs} waiting: what they use "
            f"stays cached, the other {result.flushed} tokens were forgotten"
        )
        body = error_body(409, message, code="requests_running")
        return JSONResponse(body | {"tokens": result.flushed} | _counts(result), 409)

    @operation(
        *("GET", "/flush_cache", "flushCacheByGet", "Operators"),
        answer=FlushedCache,
        errors=(409, *ENGINE_ERRORS),
        conflict=CacheInUse,
    )
    async def get_flush_cache(self) -> Response:
        """Do the same as POST /flush_cache, for clients that ask in this way."""
        return await self.flush_cache()

    @operation(*("GET", "/server_info", "getServerInfo", "Operators"), answer=ServerState, errors=ENGINE_ERRORS)
    async def server_info(self) -> ServerState:
        """Describe the server: version, model, settings, sizes, and current work."""
        info = await self.ask(GetServerInfoReq(), ServerInfo)
        state: ServerState = {
            "version": __version__,
            "model": self._model_name,
            "max_model_len": self._manager.builder.limits.max_model_len,
            "device": info.device,
            "dtype": info.dtype,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "paused": info.paused,
            "profiling": info.profiling,
            "num_pending": self._manager.num_pending,
            "defaults": self._manager.builder.defaults,
            "scheduler": _figures(info.stats),
            "settings": shown_settings(self._settings),
        }
        if info.urls:
            state["urls"] = list(info.urls)
        if info.stats.replicas:
            state["replicas"] = [_figures(stats) for stats in info.stats.replicas]
        return state

    @operation(
        *("POST", "/pause_generation", "pauseGeneration", "Operators"),
        request=PauseBody,
        example={"mode": "retract"},
        needs_body=False,
        answer=PauseState,
        errors=(*BODY_ERRORS, 409, *ENGINE_ERRORS),
    )
    async def pause(self, request: Request) -> PauseState:
        """Begin no further step, and let new requests wait. The answer is 409 if the engine is paused already."""
        mode, door = (await self._body(request, PauseBody)).mode, self._manager.door
        async with self.changes:
            if self.paused:
                raise BadRequestError("generation is paused already", status=409)
            with door.shut("pausing"):
                if mode == "abort":
                    await self.end_requests(inside=True)
                state = await self._set_paused(PauseReq(retract=mode == "retract"))
                door.close("paused")
            return state

    @operation(
        *("POST", "/continue_generation", "continueGeneration", "Operators"),
        answer=PauseState,
        errors=(409, *ENGINE_ERRORS),
    )
    async def go_on(self) -> PauseState:
        """End the pause. The answer is 409 if there is none."""
        async with self.changes:
            state = await self._set_paused(ContinueReq())
            self._manager.door.open("paused")
            return state

    @operation(
        *("POST", "/start_profile", "startProfile", "Operators"),
        request=ProfileBody,
        example={"num_steps": 10},
        needs_body=False,
        answer=ProfileTrace,
        errors=(*BODY_ERRORS, 409, *ENGINE_ERRORS),
    )
    async def start_profile(self, request: Request) -> ProfileTrace:
        """Record steps with torch's profiler, so many of them or until /stop_profile."""
        body = await self._body(request, ProfileBody)
        if self._settings.profile_dir is None:
            raise BadRequestError("profiling is off: there is no folder for traces (setting --profile-dir)", status=409)
        question = StartProfileReq(
            folder=self._settings.profile_dir,
            steps=body.num_steps,
            activities=tuple(dict.fromkeys(body.activities or ())),
        )
        return {"path": (await self.ask(question, ProfileResult)).path, "num_steps": body.num_steps}

    @operation(
        *("POST", "/stop_profile", "stopProfile", "Operators"), answer=ProfileTrace, errors=(409, *ENGINE_ERRORS)
    )
    async def stop_profile(self) -> ProfileTrace:
        """End the recording. The answer comes when the trace is written."""
        result = await self.ask(StopProfileReq(), ProfileResult)
        return {"path": result.path, "num_steps": result.steps}

    @operation(
        *("POST", "/abort_request", "abortRequest", "Operators"),
        request=AbortBody,
        example={"abort_all": True},
        answer=AbortedRequests,
        errors=(*BODY_ERRORS, *ID_ERRORS, *ENGINE_ERRORS),
    )
    async def abort(self, request: Request) -> AbortedRequests:
        """End a request, or all. The answer comes when nothing is left of them, and is 404 for an unknown id."""
        body = await self._body(request, AbortBody)
        ended = await self.end_requests(body.rid or None)
        if body.rid and not ended:
            raise BadRequestError(
                f"there is no request {body.rid!r}: it has ended, or never came", param="rid", status=404
            )
        return {"aborted": ended}

    async def end_requests(self, request_id: str | None = None, *, inside: bool = False) -> list[str]:
        """End requests (see `TokenizerManager.abort`), and return their ids when nothing is left of them."""
        ended = self._manager.abort(request_id, inside=inside)
        if ended or request_id is None:
            rids = tuple(rid for one in ended for rid in one.rids)
            await self.ask(AbortRequestsReq(rids=rids), EngineState)
        return [one.request_id for one in ended]

    async def scheduler_stats(self, timeout_s: float) -> SchedulerStats | None:
        """Return the figures of all replicas together, or None if one is gone or too busy to tell in time."""
        try:
            return (await self.ask(GetServerInfoReq(), ServerInfo, timeout_s)).stats
        except (BadRequestError, EngineUnavailableError):
            return None

    async def _set_paused(self, question: PauseReq | ContinueReq) -> PauseState:
        result = await self.ask(question, EngineState)
        self.paused = result.paused
        return cast("PauseState", {"paused": result.paused} | _counts(result))

    async def _body(self, request: Request, model: type[_T]) -> _T:
        """Read a small JSON object. An empty body stands for an empty object."""
        return await read_body(request, model, self._settings, if_empty=b"{}")  # type: ignore[type-var]

    async def ask(self, question: ControlRequest, kind: type[_T], timeout_s: float | None = None) -> _T:
        """Return the engine's result. Raises BadRequestError with the engine's reason, or EngineUnavailableError if the
        engine does not answer."""
        reason, timeout_s = self._manager.no_engine, timeout_s or ANSWER_S
        if reason is not None:
            raise EngineUnavailableError(reason)
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._send(question)
        except TimeoutError:
            raise EngineUnavailableError(
                f"the engine is still at a step after {timeout_s:g} s: what was asked for comes after it"
            ) from None
        if isinstance(result, ControlRefused):
            raise BadRequestError(result.message, status=result.status)
        assert isinstance(result, kind), result
        return result


def shown_settings(settings: ServerSettings) -> dict[str, Any]:
    """Return all settings by name, without secrets."""
    shown = asdict(settings)
    shown |= shown.pop("engine")
    shown |= {name: "set" for name in _SECRETS if shown[name] is not None}
    return dict(sorted(shown.items()))


def _counts(state: EngineState) -> dict[str, int]:
    return {"num_running_reqs": state.num_running_reqs, "num_waiting_reqs": state.num_waiting_reqs}


def _figures(stats: SchedulerStats) -> dict[str, Any]:
    """Return the figures, without those of the encoder and of single replicas."""
    return {name: value for name, value in asdict(stats).items() if name not in ("encoder", "replicas")}
