"""The API process's half of an encoder (`--role encode`): health, figures, and a hint for all other requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from vlmserve.api.app import ModelList, ModelObject, add_guards
from vlmserve.api.body import BodyBudget
from vlmserve.api.control import ANSWER_S, AskEngine, no_engine, shown_settings
from vlmserve.api.errors import RETRY_AFTER_S, error_body, install_error_handlers
from vlmserve.api.event_loop import longest_turn_s
from vlmserve.api.metrics import CONTENT_TYPE, ServerMetrics
from vlmserve.api.openapi import add_operations, add_pages, endpoints_of, operation
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.tokenizer_manager import EngineUnavailableError
from vlmserve.ipc.control_messages import GetServerInfoReq, ServerInfo
from vlmserve.ipc.messages import TokenizerManagerInput
from vlmserve_common.errors import BadRequestError
from vlmserve_common.version import __version__

_STATS_TIMEOUT_S = 0.5  # how long /metrics waits for the encoder's figures
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


class EncoderApi:
    """The endpoints of an encoder. unavailable: why it cannot be used now."""

    def __init__(self, settings: ServerSettings, model_name: str, ask: AskEngine) -> None:
        self.unavailable: str | None = None
        self._settings = settings
        self._ask = ask
        self._metrics = ServerMetrics(model_name, longest_turn_s=longest_turn_s)
        self._started = time.monotonic()
        self._model = ModelObject(
            id=model_name, object="model", created=int(time.time()), owned_by="vlmserve", max_model_len=0
        )

    @property
    def metrics(self) -> ServerMetrics:
        return self._metrics

    @operation("GET", "/health", "getHealth", "Server", answer=dict[str, str], errors=(503,))
    async def health(self) -> Response:
        """Tell whether the tower is loaded and the encoder lives."""
        if self.unavailable is not None:
            return JSONResponse(error_body(503, self.unavailable, code="engine_unavailable"), 503)
        return JSONResponse({"status": "ok"})

    @operation("GET", "/version", "getVersion", "Server", answer=dict[str, str])
    async def version(self) -> dict[str, str]:
        """Return the version of vlmserve."""
        return {"version": __version__}

    @operation("GET", "/v1/models", "listModels", "Models", answer=ModelList)
    async def list_models(self) -> ModelList:
        """List the model whose vision tower this is."""
        return {"object": "list", "data": [self._model]}

    @operation("GET", "/metrics", "getMetrics", "Server", answer="text/plain")
    async def show_metrics(self) -> Response:
        """Return figures for Prometheus."""
        try:
            stats = (await self._info(_STATS_TIMEOUT_S)).stats
        except EngineUnavailableError:
            stats = None
        return Response(self._metrics.render(stats), headers={"Content-Type": CONTENT_TYPE})

    @operation("GET", "/server_info", "getServerInfo", "Operators", answer=dict[str, Any], errors=(503,))
    async def server_info(self) -> dict[str, Any]:
        """Describe the encoder: version, settings, the address for `--encoder-urls`, and current work."""
        info = await self._info(ANSWER_S)
        return {
            "version": __version__,
            "model": self._model["id"],
            "role": self._settings.engine.role,
            "urls": list(info.urls),
            "device": info.device,
            "dtype": info.dtype,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "encoder": asdict(info.stats.encoder),
            "settings": shown_settings(self._settings),
        }

    async def refuse(self, request: Request) -> Response:
        """Refuse what only a whole server answers."""
        raise BadRequestError(
            f"this server only encodes pictures for other servers (--role encode), and has nothing at "
            f"{request.url.path}; send requests to a server with --role all",
            code="wrong_role",
        )

    async def _info(self, timeout_s: float) -> ServerInfo:
        if self.unavailable is not None:
            raise EngineUnavailableError(self.unavailable)
        try:
            async with asyncio.timeout(timeout_s):
                info = await self._ask(GetServerInfoReq())
        except TimeoutError:
            raise EngineUnavailableError(f"the encoder is still at a step after {timeout_s:g} s") from None
        assert isinstance(info, ServerInfo), info
        return info


class EncoderFrontend:
    """The API process's half of an encoder; see `vlmserve.api.app.ApiFrontend`."""

    def __init__(self, app: FastAPI, api: EncoderApi) -> None:
        self.app = app
        self._api = api
        self._lost = False

    async def start(self) -> None:
        """Do nothing: there is nothing to go on with."""

    def handle(self, message: TokenizerManagerInput) -> None:
        """Do nothing: an encoder has no requests."""

    def fail_all(self, reason: str) -> None:
        """Answer /health with 503 from now on."""
        self._lost, self._api.unavailable = True, reason

    def suspend(self, problem: str | None) -> None:
        """Answer /health with 503 until this is called with None."""
        if not self._lost:
            self._api.unavailable = problem

    async def close(self, patience_s: float = 0.0) -> None:
        """Do nothing: there is nothing to wait for."""


def make_encoder_frontend(
    settings: ServerSettings, *, model_name: str, control: AskEngine | None = None, **_: object
) -> EncoderFrontend:
    """Build the API process's half of an encoder; see `vlmserve.api.app.make_frontend`."""
    app = FastAPI(title="vlmserve", version=__version__, openapi_url=None)
    install_error_handlers(app, lambda: RETRY_AFTER_S)
    app.state.bodies = BodyBudget(settings)
    api = EncoderApi(settings, model_name, control or no_engine)
    add_operations(app, endpoints_of(api))
    keys = add_guards(app, settings, api.metrics)
    add_pages(app, model=model_name, keys=keys, admin_key=settings.admin_api_key is not None)
    app.add_api_route("/{path:path}", api.refuse, methods=_METHODS, include_in_schema=False)
    return EncoderFrontend(app, api)
