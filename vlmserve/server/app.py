"""The HTTP application: OpenAI's routes over a TokenizerManager, and what operators need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from vlmserve import __version__
from vlmserve.server.auth import ApiKeyMiddleware
from vlmserve.server.body import BodyLimits
from vlmserve.server.chat import ChatEndpoint, check_model
from vlmserve.server.errors import error_body, install_error_handlers
from vlmserve.server.file_store import FileStore
from vlmserve.server.files import FilesApi
from vlmserve.server.metrics import CONTENT_TYPE, ServerMetrics
from vlmserve.server.outermost import OutermostMiddleware
from vlmserve.server.protocol import ChatCompletionRequest, WarmupRequest
from vlmserve.server.warmup import WarmupEndpoint
from vlmserve.tokenizer.tokenizer_manager import TokenizerManager


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """What the HTTP application can be told.

    api_keys: none lets everybody in. body: limits of request bodies. max_n: most choices of a request.
    stats_timeout_s: how long /metrics waits for the scheduler's figures.
    keeps_embeddings: whether they are kept on disk. access_log: whether each request is logged.
    """

    api_keys: tuple[str, ...] = ()
    body: BodyLimits = field(default_factory=BodyLimits)
    max_n: int = 128
    stats_timeout_s: float = 0.5
    keeps_embeddings: bool = False
    access_log: bool = False


def build_app(
    manager: TokenizerManager, served_model_names: Sequence[str], settings: ApiSettings, files: FileStore
) -> FastAPI:
    """The application. The first of `served_model_names` is the one figures are labelled with."""
    app = FastAPI(title="vlmserve", version=__version__, description="OpenAI-compatible API of a Qwen-VL model")
    install_error_handlers(app)
    metrics = ServerMetrics(served_model_names[0])
    manager.observe = metrics.observe_request
    created = int(time.time())
    chat = ChatEndpoint(manager, served_model_names, files, body_limits=settings.body, max_n=settings.max_n)
    warmup = WarmupEndpoint(
        manager,
        served_model_names,
        files,
        body_limits=settings.body,
        can_pin=settings.keeps_embeddings,
    )
    models = {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vlmserve",
            "max_model_len": manager.builder.limits.max_model_len,
        }
        for name in served_model_names
    }

    async def chat_completions(request: Request) -> Response:
        return await chat(request)

    async def warm_up(request: Request) -> Response:
        return await warmup(request)

    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(models.values())}

    async def get_model(model_id: str) -> dict[str, Any]:
        check_model(model_id, served_model_names)
        return models[model_id]

    async def health() -> Response:
        if manager.unavailable is not None:
            return JSONResponse(error_body(503, manager.unavailable, code="engine_unavailable"), 503)
        return Response()

    async def show_metrics() -> Response:
        stats = await manager.scheduler_stats(settings.stats_timeout_s)
        return Response(metrics.render(stats), headers={"Content-Type": CONTENT_TYPE})

    async def version() -> dict[str, str]:
        return {"version": __version__}

    for path, endpoint, model in (
        ("/v1/chat/completions", chat_completions, ChatCompletionRequest),
        ("/v1/warmup", warm_up, WarmupRequest),
    ):
        body = {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}
        app.add_api_route(path, endpoint, methods=["POST"], openapi_extra={"requestBody": body})
    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", get_model, methods=["GET"])
    FilesApi(files, stall_s=settings.body.stall_s).add_routes(app)
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", show_metrics, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
    # The one added last is the outermost: it sees refused keys, and what fails further in.
    app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys)
    app.add_middleware(OutermostMiddleware, metrics=metrics, access_log=settings.access_log)
    return app
