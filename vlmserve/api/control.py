"""What operators ask of a running server, under the names that SGLang gave these endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias, TypeVar

from fastapi import FastAPI, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response

from vlmserve.api.body import read_body
from vlmserve.api.errors import error_body
from vlmserve.api.protocol import StrictModel
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.tokenizer_manager import EngineUnavailableError, TokenizerManager
from vlmserve.ipc.control_messages import (
    AbortRequestsReq,
    AbortRequestsResult,
    Activity,
    ContinueReq,
    ControlRefused,
    ControlRequest,
    ControlResult,
    FlushCacheReq,
    FlushCacheResult,
    GetServerInfoReq,
    PauseReq,
    PauseResult,
    ProfileResult,
    ServerInfo,
    StartProfileReq,
    StopProfileReq,
)
from vlmserve.ipc.messages import SchedulerStats
from vlmserve.ipc.replica_sums import replicas_of
from vlmserve_common.errors import BadRequestError
from vlmserve_common.version import __version__

AskEngine: TypeAlias = Callable[[ControlRequest], Awaitable[ControlResult]]
"""Sends a control message to the engine, and brings its answer."""


async def no_engine(_: ControlRequest) -> ControlResult:
    """What answers where no engine takes control messages."""
    return ControlRefused(message="this server's engine takes no control messages", status=501)


# A message is taken between two steps; on a CPU one may take long, and so does writing a profile.
ANSWER_S = 60.0
_MOST_STEPS = 10**6  # hours of them
_SECRETS = frozenset(("api_key", "admin_api_key"))
_T = TypeVar("_T")


class AbortBody(StrictModel):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> AbortBody:
        if (self.rid is not None) == bool(self.abort_all):
            raise PydanticCustomError("abort_what", "needs either a rid or abort_all: true")
        return self


class ProfileBody(StrictModel):
    """POST /start_profile."""

    num_steps: Annotated[int | None, Field(ge=1, le=_MOST_STEPS)] = None
    activities: list[Activity] | None = None


class ControlApi:
    """The endpoints. paused: whether the engine begins no step, as far as this process was told."""

    def __init__(self, manager: TokenizerManager, ask: AskEngine, settings: ServerSettings, model_name: str) -> None:
        self.paused = False
        self._manager = manager
        self._send = ask
        self._settings = settings
        self._model_name = model_name
        self._started = time.monotonic()

    def add_routes(self, app: FastAPI) -> None:
        """To the application."""
        app.add_api_route("/server_info", self.server_info, methods=["GET"])
        for path, endpoint in (
            ("/flush_cache", self.flush_cache),
            ("/pause_generation", self.pause),
            ("/continue_generation", self.go_on),
            ("/start_profile", self.start_profile),
            ("/stop_profile", self.stop_profile),
            ("/abort_request", self.abort),
        ):
            app.add_api_route(path, endpoint, methods=["POST"])

    async def flush_cache(self) -> Response:
        """Forget cached prefixes; 409 while requests are there, which keep theirs."""
        result = await self._ask(FlushCacheReq(), FlushCacheResult)
        there = result.num_running_reqs + result.num_waiting_reqs
        if not there:
            return JSONResponse({"flushed_tokens": result.tokens})
        message = (
            f"{result.num_running_reqs} requests are running and {result.num_waiting_reqs} waiting: what they use "
            f"stays cached, the other {result.tokens} tokens were forgotten"
        )
        body = error_body(409, message, code="requests_running")
        return JSONResponse(body | asdict(result), 409)

    async def server_info(self) -> dict[str, Any]:
        """Version, model, settings without secrets, sizes, and what is going on."""
        info = await self._ask(GetServerInfoReq(), ServerInfo)
        settings = asdict(self._settings)
        settings |= settings.pop("engine")
        settings |= {name: "set" for name in _SECRETS if settings[name] is not None}
        replicas = replicas_of(info.stats)
        return {
            "version": __version__,
            "model": self._model_name,
            "max_model_len": self._manager.builder.limits.max_model_len,
            "device": info.device,
            "dtype": info.dtype,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "paused": info.paused,
            "profiling": info.profiling,
            "num_pending": self._manager.num_pending,
            "scheduler": _figures(info.stats),
            **({"replicas": [_figures(stats) for stats in replicas]} if replicas else {}),
            "settings": dict(sorted(settings.items())),
        }

    async def pause(self) -> dict[str, Any]:
        """Begin no further step; 409 if that is so already."""
        return await self._set_paused(PauseReq())

    async def go_on(self) -> dict[str, Any]:
        """End the pause; 409 if there is none."""
        return await self._set_paused(ContinueReq())

    async def start_profile(self, request: Request) -> dict[str, Any]:
        """Record what the engine does, for so many steps or until it is told to stop."""
        body = await self._body(request, ProfileBody)
        if self._settings.profile_dir is None:
            raise BadRequestError("profiling is off: there is no folder for traces (setting --profile-dir)", status=409)
        question = StartProfileReq(
            folder=self._settings.profile_dir,
            steps=body.num_steps,
            activities=tuple(dict.fromkeys(body.activities or ())),
        )
        return {"path": (await self._ask(question, ProfileResult)).path, "num_steps": body.num_steps}

    async def stop_profile(self) -> dict[str, Any]:
        """End the recording; answers when the trace is written."""
        result = await self._ask(StopProfileReq(), ProfileResult)
        return {"path": result.path, "num_steps": result.steps}

    async def abort(self, request: Request) -> dict[str, Any]:
        """End a request, or all; answers when nothing is left of them. 404 for an id that is not there."""
        body = await self._body(request, AbortBody)
        ended = self._manager.abort(body.rid)
        if body.rid is not None and not ended:
            raise BadRequestError(
                f"there is no request {body.rid!r}: it has ended, or never came", param="rid", status=404
            )
        rids = tuple(rid for one in ended for rid in one.rids)
        await self._ask(AbortRequestsReq(rids=rids), AbortRequestsResult)
        return {"aborted": [one.request_id for one in ended]}

    async def _set_paused(self, question: PauseReq | ContinueReq) -> dict[str, Any]:
        result = await self._ask(question, PauseResult)
        self.paused = result.paused
        return asdict(result)

    async def _body(self, request: Request, model: type[_T]) -> _T:
        """A small JSON object; no body at all is an empty one."""
        return await read_body(request, model, self._settings, if_empty=b"{}")  # type: ignore[type-var]

    async def _ask(self, question: ControlRequest, kind: type[_T]) -> _T:
        """The engine's result. Raises BadRequestError with its reason, EngineUnavailableError if it does not answer."""
        reason = self._manager.unavailable
        if reason is not None:
            raise EngineUnavailableError(reason)
        try:
            async with asyncio.timeout(ANSWER_S):
                result = await self._send(question)
        except TimeoutError:
            raise EngineUnavailableError(
                f"the engine is still at a step after {ANSWER_S:g} s: what was asked for comes after it"
            ) from None
        if isinstance(result, ControlRefused):
            raise BadRequestError(result.message, status=result.status)
        assert isinstance(result, kind), result
        return result


def _figures(stats: SchedulerStats) -> dict[str, Any]:
    """Without those of the encoder, which are many, and of single replicas."""
    return {name: value for name, value in asdict(stats).items() if name not in ("encoder", "replica", "replicas")}
