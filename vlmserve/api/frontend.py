"""Builds the API process: tokenizer, template, processors, TokenizerManager and the HTTP application."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from fastapi import FastAPI

from vlmserve.api.app import Stores, build_app
from vlmserve.api.batches.journal import BatchJournal
from vlmserve.api.control import AskEngine
from vlmserve.api.file_store import FileStore
from vlmserve.api.outermost import access, requests
from vlmserve.api.responses.store import ResponseStore
from vlmserve.api.tracing import RequestTracer, otlp_processor
from vlmserve.config.settings import ServerSettings
from vlmserve.config.start_settings import StartSettings
from vlmserve.frontend.media import RequestMedia
from vlmserve.frontend.stage import make_tokenizer_stage, stage_limits
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve.ipc.messages import PreparedMessage, SchedulerInput
from vlmserve.ipc.private_dir import PrivateDirectory


class ApiFrontend:
    """The API process's half of a server. `app` is the ASGI application; the launcher calls the rest.

    handle: takes a message from the detokenizer. fail_all: answers all pending and later requests, and /health, with
    503 and the message; may be called again. suspend: answers later requests and /health so until it is called with
    None; pending requests wait.
    """

    def __init__(self, manager: TokenizerManager, media: RequestMedia, app: FastAPI, stack: ExitStack) -> None:
        self.app = app
        self.manager = manager
        self.handle, self.fail_all, self.suspend = manager.handle, manager.fail, manager.suspend
        self._media = media
        self._stack = stack

    def start(self) -> None:
        """Go on with the batches of the last server."""
        self.app.state.batches.start()

    async def close(self) -> None:
        """Free threads and connections."""
        await self.app.state.batches.stop()
        self.manager.close()
        await self._media.close()
        await asyncio.to_thread(self._stack.close)


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
    CheckpointError if the folder lacks a tokenizer, a chat template or a processor, and EngineError if another server
    uses the folder of uploaded files.
    """
    engine = settings.engine
    if settings.access_log:
        access.setLevel(logging.INFO)  # whatever --log-level is: it was asked for
    if settings.log_requests:
        requests.setLevel(logging.INFO)
    with ExitStack() as stack:
        files = _open_files(settings, stack)
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
        app = build_app(manager, model_name, settings, files, control, tracer, _open_stores(files, settings, stack))
        return ApiFrontend(manager, stage.media, app, stack.pop_all())


def _open_files(settings: ServerSettings, stack: ExitStack) -> FileStore:
    """Open the store of uploaded files, which `stack` closes. A private folder is removed with the server."""
    if settings.file_store_dir is None:
        folder = stack.enter_context(PrivateDirectory(Path(tempfile.gettempdir()), "vlmserve-files")).path / "files"
        folder.mkdir()
    else:
        folder = Path(settings.file_store_dir)
    files = FileStore(folder, settings)
    stack.callback(files.close)
    return files


def _open_stores(files: FileStore, settings: ServerSettings, stack: ExitStack) -> Stores:
    """Open the stores of responses and batches, which `stack` closes. Raises EngineError for unusable files."""
    responses = ResponseStore(
        files.folder, most=settings.max_stored_responses, most_bytes=settings.max_stored_response_bytes
    )
    stack.callback(responses.close)
    batches = BatchJournal(files.folder)
    stack.callback(batches.close)
    return Stores(responses=responses, batches=batches)
