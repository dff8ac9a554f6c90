"""A model in this process for many requests at a time. An event loop asks, and a thread of the engine computes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait
from typing import TypeVar, Unpack

import torch

from processors.fetch.limits import FetchSettings
from vlmserve.commands.offline.inputs import EngineSettings, check_messages, keywords_named, read_settings
from vlmserve.commands.offline.llm import build_offline_engine
from vlmserve.commands.offline.weights import AsyncWeights
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.control import EngineControl
from vlmserve.engine.profiling import Profiler
from vlmserve.frontend.adapters import AdapterRegistry
from vlmserve.frontend.detokenizer import DetokenizerManager, join_outputs
from vlmserve.frontend.request_builder import ChatPrompt, GenerateReqInput, RequestBuilder
from vlmserve.frontend.stage import StageLimits
from vlmserve.frontend.tokenizer_manager import ChoiceOutput, TokenizerManager
from vlmserve.frontend.weight_changes import WeightChanges
from vlmserve.ipc.control_messages import (
    AbortRequestsReq,
    ContinueReq,
    ControlRefused,
    ControlRequest,
    ControlResult,
    EngineState,
    FlushCacheReq,
    GetServerInfoReq,
    PauseReq,
    ServerInfo,
)
from vlmserve.ipc.messages import (
    BatchTextOutput,
    BatchTokenizedGenerateReqInput,
    BatchTokenOutput,
    RequestsLost,
    SchedulerInput,
    SchedulerOutput,
    SchedulerStats,
    TokenOutput,
)
from vlmserve.ipc.weight_messages import WeightsDone
from vlmserve_common.errors import BadRequestError, EngineError, EngineUnavailableError
from vlmserve_common.process.wake_up import WakeUp

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_STOP = object()
_STATS_S = 1.0


def _check(request: GenerateReqInput) -> None:
    if isinstance(request.prompt, ChatPrompt):
        check_messages(request.prompt.messages)


class AsyncLLM:
    """A model in this process for many requests at a time. `generate` is called in one event loop, until `close`.

    model, fetch, settings: as of `LLM`. Instead, model may be `EngineArgs`, together with limits. joined: each answer
    comes whole, as one output; then a step of many requests costs the event loop nothing. max_pending: answers that
    wait or run at a time. weights: changes them, and gives memory back; its methods are awaited. Raises
    CheckpointError, EngineError or SettingsError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineArgs = "",
        limits: StageLimits | None = None,
        *,
        fetch: FetchSettings | None = None,
        joined: bool = False,
        max_pending: int = 1024,
        log_level: str = "info",
        **settings: Unpack[EngineSettings],
    ) -> None:
        if isinstance(model, EngineArgs):
            if settings or fetch is not None:
                raise TypeError(
                    "settings belong into the EngineArgs, and fetch into the StageLimits, where these are given"
                )
            args, limits = model, limits or StageLimits()
        elif limits is not None:
            raise TypeError("StageLimits go with EngineArgs; without these give fetch, and settings as keywords")
        else:
            args, limits = read_settings(model, fetch, settings)
        self._words = contextlib.nullcontext if isinstance(model, EngineArgs) else keywords_named
        with self._words():
            self._engine = build_offline_engine(args, limits, self._take, log_level=log_level)
        self._torch_threads = torch.get_num_threads()
        self.args, self.info = self._engine.args, self._engine.info
        self._detokenizer = DetokenizerManager(self._engine.stage.tokenizer)
        self._control = EngineControl(
            self._engine.loop,
            Profiler("engine"),
            self._engine.weights,
            device=self.info.device,
            dtype=self.info.dtype,
            adapters=self._engine.lora,
        )
        self._asked: set[Future[ControlResult]] = set()
        self._unfinished: dict[str, TokenOutput] | None = {} if joined else None
        self._inbox: queue.SimpleQueue[SchedulerInput | object] = queue.SimpleQueue()
        self._wake_up = WakeUp()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._manager = TokenizerManager(
            builder=self._engine.stage.builder,
            media=self._engine.stage.media,
            send=self._put,
            max_pending=max_pending,
        )
        self._adapters = self._manager.adapters = AdapterRegistry(
            self._ask,
            base="",
            most=self.args.max_loaded_loras,
            folder=self.args.allowed_lora_path,
            enabled=self.args.enable_lora,
            clock=time.time,
        )
        for name, loaded in self._engine.adapters.loaded.items():
            self._adapters.adopt(name, loaded)
        self.weights = AsyncWeights(
            WeightChanges(
                self._manager,
                asyncio.Lock(),
                order=lambda order: self._ask(order, WeightsDone),
                end_inside=partial(self._abort, None, inside=True),
                is_paused=lambda: self._control.paused,
            )
        )
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    @property
    def builder(self) -> RequestBuilder:
        """Return the builder of requests, which has the tokenizer."""
        return self._engine.stage.builder

    def adapter_digest(self, name: str) -> str:
        """Return the digest of an adapter's files."""
        found = self._adapters.find(name)
        assert found is not None, name
        return found.ref.digest

    async def load_lora_adapter(self, name: str, path: str | os.PathLike[str], *, pinned: bool = False) -> None:
        """Load a LoRA adapter, a folder of PEFT, under a new name, which `generate(lora=NAME)` chooses. pinned: it
        stays in memory. Raises BadRequestError if it does not fit the model, for a name that is taken, and without
        enable_lora."""
        self._loop = asyncio.get_running_loop()
        await self._adapters.load(name, str(path), pinned=pinned)

    async def unload_lora_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Requests that run end with it. BadRequestError if there is none of this name."""
        await self._adapters.unload(name)

    def describe_media_settings(self) -> str:
        """Return a text that changes if the same medium may become other patches."""
        return self._engine.stage.media.describe_settings()

    async def generate(
        self, request: GenerateReqInput, *, lora: str | None = None
    ) -> AsyncGenerator[ChoiceOutput, None]:
        """Yield the outputs of a request; see `TokenizerManager.generate`. Messages are checked as by the server. lora:
        the name of an adapter."""
        self._loop = asyncio.get_running_loop()
        with self._words():
            _check(request)
            request = self._adapters.adapted(request, lora)
            async with contextlib.aclosing(self._manager.generate(request)) as outputs:
                async for output in outputs:
                    yield output

    async def generate_batch(
        self, requests: Sequence[GenerateReqInput], *, lora: str | None = None
    ) -> AsyncGenerator[ChoiceOutput, None]:
        """Yield the outputs of several requests as one; see `TokenizerManager.stream`, and `generate`."""
        self._loop = asyncio.get_running_loop()
        for request in requests:
            _check(request)
        requests = [self._adapters.adapted(request, lora) for request in requests]
        async with contextlib.aclosing(self._manager.stream(*requests)) as batches:
            async for items in batches:
                for item in items:
                    yield item

    async def stats(self) -> SchedulerStats | None:
        """Return the scheduler's figures. None if the engine has failed, or does not answer within a second."""
        try:
            async with asyncio.timeout(_STATS_S):
                info = await self._control_engine(GetServerInfoReq())
        except (TimeoutError, EngineError):
            return None
        assert isinstance(info, ServerInfo)
        return info.stats

    async def abort(self, request_id: str | None = None) -> list[str]:
        """End a request by its `request_id`, or all requests; return the ids of the ended ones.

        Their `generate` raises RequestAbortedError. Nothing is left of them when this returns.
        """
        return await self._abort(request_id)

    async def _abort(self, request_id: str | None, *, inside: bool = False) -> list[str]:
        ended = self._manager.abort(request_id, inside=inside)
        await self._control_engine(AbortRequestsReq(rids=tuple(rid for one in ended for rid in one.rids)))
        return [one.request_id for one in ended]

    async def flush_cache(self) -> int:
        """Forget the cached prefixes that no request uses; return how many tokens these had."""
        result = await self._control_engine(FlushCacheReq())
        assert isinstance(result, EngineState)
        return result.flushed

    async def pause(self) -> None:
        """Begin no further step until `resume`; requests wait. Raises EngineError if the engine is paused already."""
        await self._control_engine(PauseReq())

    async def resume(self) -> None:
        """Go on after `pause`. Raises EngineError if the engine is not paused."""
        await self._control_engine(ContinueReq())

    async def _ask(self, question: ControlRequest, kind: type[_T]) -> _T:
        """Return the engine's result of a kind. Raises BadRequestError with its reason."""
        result = await self._answer(question)
        if isinstance(result, ControlRefused):
            raise BadRequestError(result.message, status=result.status)
        assert isinstance(result, kind), result
        return result

    async def _control_engine(self, question: ControlRequest) -> ControlResult:
        """Return the answer of the engine's thread, between two steps. Raises EngineError with its reason."""
        result = await self._answer(question)
        if isinstance(result, ControlRefused):
            raise EngineError(result.message)
        return result

    async def _answer(self, question: ControlRequest) -> ControlResult:
        if self._manager.no_engine is not None:
            raise EngineUnavailableError(self._manager.no_engine)
        self._loop = asyncio.get_running_loop()
        answer = Future[ControlResult]()
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)
        self._put((question, answer))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the engine after the step in work, and its processes. Blocks; while the event loop runs, call it in
        another thread."""
        self._manager.suspend("this AsyncLLM is closed, and computes nothing more; make a new one")
        closing, loop = self._engine.stage.media.close(), self._loop
        if loop is not None and loop.is_running():
            asyncio.run_coroutine_threadsafe(closing, loop).result()
        else:
            asyncio.run(closing)
        self._put(_STOP)
        self._thread.join()
        self._wake_up.close()
        self._manager.close()
        self._engine.stack.close()

    def _put(self, message: SchedulerInput | object) -> None:
        self._inbox.put(message)
        self._wake_up.call()

    # ---------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)  # each thread has its own
        engine, busy = self._engine.loop, False
        try:
            while True:
                if not busy:
                    # paused, the encoder's results wait with the requests
                    handles = engine.wait_handles() if self._control.goes_on else []
                    wait([self._wake_up.fd, *handles])
                if not self._take_messages():
                    return
                busy = self._control.step()
        except Exception as error:
            logger.exception("the engine failed")
            self._tell(self._fail, f"the engine has failed: {type(error).__name__}: {error}")

    def _take_messages(self) -> bool:
        """Hand new messages to the engine. Returns False when it is time to stop."""
        engine = self._engine.loop
        self._wake_up.take()
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if message is _STOP:
                    return False
                if isinstance(message, tuple):
                    question, answer = message
                    result = self._control.handle(question)
                    if answer.set_running_or_notify_cancel():  # else the waiting task has ended
                        answer.set_result(result)
                elif isinstance(message, BatchTokenizedGenerateReqInput):
                    for request in message.requests:
                        engine.handle(request)
                elif not isinstance(message, RequestsLost):  # which only processes can lose
                    engine.handle(message)  # type: ignore[arg-type]
        return True

    def _fail(self, reason: str) -> None:
        self._manager.fail(reason)
        for answer in tuple(self._asked):
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineUnavailableError(reason))

    def _take(self, batch: SchedulerOutput) -> None:
        if not isinstance(batch, BatchTokenOutput):
            self._tell(self._manager.handle, batch)
            return
        texts, aborts = self._detokenizer.process(batch)
        for abort in aborts:
            self._engine.loop.handle(abort)
        outputs = texts.outputs
        if self._unfinished is not None:
            joined = [join_outputs(self._unfinished.pop(output.rid, None), output) for output in outputs]
            self._unfinished |= {output.rid: output for output in joined if output.finish_reason is None}
            outputs = tuple(output for output in joined if output.finish_reason is not None)
        if outputs:
            self._tell(self._manager.handle, BatchTextOutput(outputs=outputs))

    def _tell(self, function: object, *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there are no waiting requests
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]
