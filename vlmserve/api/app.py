"""The API process's half of a server: a TokenizerManager, and over it OpenAI's endpoints and those of operators."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NotRequired

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.adapters import AdapterApi
from vlmserve.api.api_keys import read_api_keys
from vlmserve.api.auth import ApiKeyMiddleware, WebPageGuard
from vlmserve.api.batches.api import BatchesApi
from vlmserve.api.batches.journal import BatchJournal
from vlmserve.api.batches.runner import batch_endpoints, make_runner
from vlmserve.api.body import BodyBudget
from vlmserve.api.chat import complete_chat
from vlmserve.api.completions import complete
from vlmserve.api.control import AskEngine, ControlApi, no_engine
from vlmserve.api.errors import error_body, install_error_handlers
from vlmserve.api.event_loop import longest_turn_s
from vlmserve.api.file_store import FileStore
from vlmserve.api.files import FilesApi
from vlmserve.api.front_page import add_front_page
from vlmserve.api.generate import generate
from vlmserve.api.metrics import CONTENT_TYPE, ServerMetrics
from vlmserve.api.openapi import ID_ERRORS, Operation, add_operations, add_pages, endpoints_of, operation
from vlmserve.api.outermost import OutermostMiddleware, access, log_request, requests
from vlmserve.api.pooling.embeddings import embed, embed_cohere
from vlmserve.api.pooling.rerank import RERANK_ENDPOINTS
from vlmserve.api.request_id import HEADER as REQUEST_ID_HEADER
from vlmserve.api.responses.api import ResponsesApi, ResponseStore
from vlmserve.api.responses.held import HeldMedia
from vlmserve.api.score import score
from vlmserve.api.served_model import ServedModel
from vlmserve.api.sessions.api import SessionsApi
from vlmserve.api.sessions.held import HeldSessions
from vlmserve.api.sessions.live_api import FRAMES_PATH, LiveApi
from vlmserve.api.stores.opening import Stores, open_stores
from vlmserve.api.tokenization import detokenize, tokenize
from vlmserve.api.tracing import RequestTracer, otlp_processor
from vlmserve.api.transcriptions import transcribe
from vlmserve.api.warmup import warm_up
from vlmserve.api.weights import WeightsApi
from vlmserve.config.engine_args import StartSettings
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.adapters import AdapterRegistry, NamedAdapter
from vlmserve.frontend.media import RequestMedia
from vlmserve.frontend.parsers.answer import choose_formats
from vlmserve.frontend.request_stats import RequestStats
from vlmserve.frontend.stage import make_tokenizer_stage, stage_limits
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve.ipc.messages import PreparedMessage, SchedulerInput
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.threads import Threads
from vlmserve_common.version import __version__

_HEALTH_TIMEOUT_S = 20.0  # for the engine, when it is asked for a sign of life
_STATS_TIMEOUT_S = 0.5  # how long /metrics waits for the scheduler's figures
_LEAST_S = 1.0  # what each step of closing gets, however late it is
_CONVERTING_THREADS = 2  # more share the interpreter
_BATCH_THREADS = 4  # that read and write the files of batches


_MODEL_ENDPOINTS = (
    *(complete_chat, complete, generate, embed, embed_cohere, *RERANK_ENDPOINTS, score),
    *(transcribe, warm_up, tokenize, detokenize),
)


class ModelObject(TypedDict):
    """The served model, or an adapter. max_model_len: the context length in tokens. parent: the model that an adapter
    changes. root: its folder."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]
    root: NotRequired[str]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


class Health(TypedDict):
    status: Literal["ok", "paused"]


class Version(TypedDict):
    version: str


class ServerApi:
    """The endpoints that describe the model and the server."""

    def __init__(self, served: ServedModel, operators: ControlApi, metrics: ServerMetrics) -> None:
        self._served = served
        self._operators = operators
        self._metrics = metrics
        self._model = ModelObject(
            id=served.name,
            object="model",
            created=int(time.time()),
            owned_by="vlmserve",
            max_model_len=served.manager.builder.limits.max_model_len,
        )

    @operation("GET", "/v1/models", "listModels", "Models", answer=ModelList)
    async def list_models(self) -> ModelList:
        """List the model that is served, and its LoRA adapters."""
        return {"object": "list", "data": [self._model, *map(self._of_adapter, self._served.adapters.all())]}

    @operation("GET", "/v1/models/{model_id:path}", "getModel", "Models", answer=ModelObject, errors=ID_ERRORS)
    async def get_model(self, model_id: str) -> ModelObject:
        """Describe the model of a name."""
        found = self._served.adapter_of(model_id)
        return self._model if found is None else self._of_adapter(found)

    def _of_adapter(self, adapter: NamedAdapter) -> ModelObject:
        own: ModelObject = {"id": adapter.name, "created": adapter.created}  # type: ignore[typeddict-item]
        return self._model | own | {"parent": self._model["id"], "root": adapter.ref.path}

    @operation("GET", "/health", "getHealth", "Server", answer=Health, errors=(503,))
    async def health(self) -> Response:
        """Tell whether the model is loaded and the engine lives."""
        unavailable = self._served.manager.unavailable
        if unavailable is not None:
            return JSONResponse(error_body(503, unavailable, code="engine_unavailable"), 503)
        return JSONResponse({"status": "paused" if self._operators.paused else "ok"})

    @operation("GET", "/health_generate", "getHealthOfEngine", "Server", answer=Health, errors=(503,))
    async def health_generate(self) -> Response:
        """Tell whether the engine answers between two steps, for SGLang's clients."""
        if await self._operators.scheduler_stats(_HEALTH_TIMEOUT_S) is None:
            return JSONResponse(error_body(503, "the engine does not answer", code="engine_unavailable"), 503)
        return await self.health()

    @operation("GET", "/version", "getVersion", "Server", answer=Version)
    async def version(self) -> Version:
        """Return the version of vlmserve."""
        return {"version": __version__}

    @operation("GET", "/metrics", "getMetrics", "Server", answer="text/plain")
    async def show_metrics(self) -> Response:
        """Return figures for Prometheus."""
        stats = await self._operators.scheduler_stats(_STATS_TIMEOUT_S)
        return Response(self._metrics.render(stats), headers={"Content-Type": CONTENT_TYPE})


def all_operations() -> list[Operation]:
    """Return all operations that the API can have."""
    kinds = (ServerApi, FilesApi, ResponsesApi, SessionsApi, LiveApi, BatchesApi, ControlApi, AdapterApi, WeightsApi)
    return [endpoint.operation for endpoint in (*_MODEL_ENDPOINTS, *(e for kind in kinds for e in endpoints_of(kind)))]


def _of_model(
    endpoint: Callable[[ServedModel, Request], Awaitable[Response]], served: ServedModel
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await endpoint(served, request)

    answer.operation = endpoint.operation  # type: ignore[attr-defined]
    return answer


def build_app(
    manager: TokenizerManager,
    model_name: str,
    settings: ServerSettings,
    stores: Stores,
    files: FileStore,
    stack: ExitStack,
    control: AskEngine | None = None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """Build the application.

    model_name: the model's name for clients. stores: for responses and batches, which `stack` closes. control: sends
    the requests of operators to the engine. tracer: gets ended chat requests. app.state.batches answers batches. Raises
    EngineError for unusable stores.
    """
    app = FastAPI(title="vlmserve", version=__version__, openapi_url=None)  # `add_pages` has its own
    install_error_handlers(app, manager.retry_after_s)
    app.state.bodies = BodyBudget(settings)
    # Large bodies are parsed one at a time: the interpreter does one at a time, and nothing beside.
    app.state.parsing = Threads("bodies", 1)
    stack.callback(app.state.parsing.close)
    prefixes = settings.metrics_prefixes
    metrics = ServerMetrics(model_name, prefixes=prefixes.split(",") if prefixes else (), longest_turn_s=longest_turn_s)
    manager.observe = _observer(metrics, settings)
    manager.observe_tokens = metrics.observe_tokens
    operators = ControlApi(manager, control or no_engine, settings, model_name)
    formats = choose_formats(settings.tool_call_parser, settings.reasoning_parser, manager.builder.template.text)
    converting = Threads("conversions", _CONVERTING_THREADS)
    stack.callback(converting.close)
    adapters = manager.adapters = AdapterRegistry(
        operators.ask,
        base=model_name,
        most=settings.engine.max_loaded_loras,
        folder=settings.engine.allowed_lora_path,
        enabled=settings.engine.enable_lora,
        clock=time.time,
    )
    served = ServedModel(
        name=model_name,
        adapters=adapters,
        manager=manager,
        files=files,
        settings=settings,
        formats=formats,
        threads=converting,
    )
    add_operations(app, (_of_model(endpoint, served) for endpoint in _MODEL_ENDPOINTS))
    add_operations(app, endpoints_of(ServerApi(served, operators, metrics)))
    add_operations(app, endpoints_of(FilesApi(files, settings)))
    store = ResponseStore(stores, most=settings.max_stored_responses, most_bytes=settings.max_stored_response_bytes)
    stack.callback(store.close)
    journal = BatchJournal(stores)
    stack.callback(journal.close)
    held = app.state.response_media = HeldMedia(settings.max_response_media_bytes, settings.open_session_timeout_s)
    responses = ResponsesApi(served, store, held)
    reading = Threads("batch-files", _BATCH_THREADS)
    stack.callback(reading.close)
    app.state.batches = make_runner(served, journal, batch_endpoints(served, responses, reading), reading)
    add_operations(app, endpoints_of(responses))
    sessions = HeldSessions(settings)
    metrics.watch("response_media_bytes", "Memory of the media of stored responses", lambda: held.nbytes)
    metrics.watch("open_sessions", "Open sessions", lambda: sessions.count)
    metrics.watch("open_session_bytes", "Memory of all open sessions", lambda: sessions.nbytes)
    sessions_api = SessionsApi(served, sessions)
    live = app.state.live = LiveApi(served, sessions, sessions_api, BodyBudget(settings, "frames of live video"))
    add_operations(app, [*endpoints_of(sessions_api), *endpoints_of(live)])
    app.add_api_websocket_route(FRAMES_PATH, live.frames)
    add_operations(app, endpoints_of(BatchesApi(journal, app.state.batches, files, settings)))
    add_operations(app, endpoints_of(operators))
    add_operations(app, endpoints_of(AdapterApi(adapters, settings)))
    add_operations(app, endpoints_of(WeightsApi(manager, operators, settings)))
    keys = add_guards(app, settings, metrics, tracer, files)
    add_pages(app, model=model_name, keys=keys, admin_key=settings.admin_api_key is not None)
    add_front_page(
        app,
        model=model_name,
        family=str(read_json(Path(settings.engine.model), "config.json", required=False).get("model_type")),
        max_model_len=manager.builder.limits.max_model_len,
        keys=keys,
    )
    return app


def add_guards(
    app: FastAPI,
    settings: ServerSettings,
    metrics: ServerMetrics,
    tracer: RequestTracer | None = None,
    files: FileStore | None = None,
) -> bool:
    """Put the checks of keys and web pages around an application, and what counts its requests around these. Return
    whether clients need a key. files: is told whether several clients have the same name."""
    # The one added last is the outermost: it sees refused keys, and what fails further in.
    keys = read_api_keys(settings)
    if files is not None:
        files.shared = keys is not None and keys.shared
    if keys is not None or settings.admin_api_key is not None:
        scope = settings.cache_scope
        scoped = scope == "key" or (scope == "auto" and settings.api_key_file is not None)
        app.add_middleware(ApiKeyMiddleware, keys=keys, admin_key=settings.admin_api_key, scoped=scoped)
    origins = tuple((settings.allowed_origins or "").split(","))
    if keys is None:
        hosts = tuple((settings.allowed_hosts or "").lower().split(","))
        app.add_middleware(WebPageGuard, hosts=hosts, origins=origins, bound=settings.host)
    if settings.allowed_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
    app.add_middleware(
        OutermostMiddleware,
        metrics=metrics,
        bodies=app.state.bodies,
        access_log=settings.access_log,
        tracer=tracer,
    )
    return keys is not None


def _observer(metrics: ServerMetrics, settings: ServerSettings) -> Callable[[RequestStats], None]:
    def observe(stats: RequestStats) -> None:
        metrics.observe_request(stats)
        if settings.log_requests:
            log_request(stats)

    return observe


class ApiFrontend:
    """The API process's half of a server. `app` is the ASGI application; the launcher calls the rest.

    handle: takes a message from the detokenizer. fail_all: answers all pending and later requests, and /health, with
    503 and the message; may be called again. suspend: answers later requests and /health so until it is called with
    None; pending requests wait. lora_paths: as the setting says.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        media: RequestMedia,
        app: FastAPI,
        stack: ExitStack,
        lora_paths: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._lora_paths = lora_paths
        self.app = app
        self.manager = manager
        self.handle, self.fail_all, self.suspend = manager.handle, manager.fail, manager.suspend
        self._media = media
        self._stack = stack

    async def start(self) -> None:
        """Load the adapters of --lora-paths, and go on with batches that nobody works on. Raises EngineError."""
        for name, path in self._lora_paths:
            try:
                assert self.manager.adapters is not None
                await self.manager.adapters.load(name, path, trusted=True)
            except BadRequestError as error:
                raise EngineError(f"--lora-paths {name}={path}: {error.message}") from None
        self.app.state.batches.start()

    async def close(self, patience_s: float = 30.0) -> None:
        """Free threads and connections. Whatever waits for a thread when `patience_s` are over is left behind."""
        loop = asyncio.get_running_loop()
        until, last = loop.time() + patience_s, Threads("closing", 1)
        for step in (
            self.app.state.batches.stop,
            self.app.state.live.close,
            self._close_requests,
            lambda: last.run(self._stack.close),
        ):
            task = loop.create_task(step())
            await asyncio.wait((task,), timeout=max(_LEAST_S, until - loop.time()))
            if task.done():
                task.result()
        last.close()

    async def _close_requests(self) -> None:
        self.manager.close()
        await self._media.close()


def make_frontend(
    settings: ServerSettings,
    *,
    max_model_len: int,
    auto_pixels: int | None = None,
    model_name: str,
    send: Callable[[SchedulerInput], None],
    prepare: Callable[[SchedulerInput], PreparedMessage] | None = None,
    control: AskEngine | None = None,
    start: StartSettings | None = None,
) -> ApiFrontend:
    """Build the API process's half of a server. Call this in the running event loop.

    settings.engine.model: the checkpoint folder. max_model_len: in tokens. auto_pixels: the value that `--max-pixels
    auto` stands for. control: sends the requests of operators to the engine. start: for media processes. Raises
    CheckpointError if the folder lacks a tokenizer, a chat template or a processor, and EngineError for stores that
    cannot be used.
    """
    engine = settings.engine
    if settings.access_log:
        access.setLevel(logging.INFO)  # whatever --log-level is: it was asked for
    if settings.log_requests:
        requests.setLevel(logging.INFO)
    with ExitStack() as stack:
        stores = open_stores(settings, stack)
        files = FileStore(stores, settings)
        stack.callback(files.close)
        stage = make_tokenizer_stage(
            engine,
            stage_limits(settings),
            max_model_len=max_model_len,
            auto_pixels=auto_pixels,
            start=start,
        )
        manager = TokenizerManager(
            builder=stage.builder,
            media=stage.media,
            send=send,
            prepare=prepare,
            max_pending=engine.dp_size * (engine.max_running_requests + engine.max_queued_requests),
            request_timeout_s=settings.request_timeout_s,
        )
        tracer = None
        if settings.otlp_traces_endpoint is not None:
            tracer = RequestTracer(model_name, otlp_processor(settings.otlp_traces_endpoint))
            stack.callback(tracer.close)
        app = build_app(manager, model_name, settings, stores, files, stack, control, tracer)
        return ApiFrontend(manager, stage.media, app, stack.pop_all(), engine.adapters_at_start)
