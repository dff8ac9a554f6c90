"""The API process's end of the engine: requests in, text out, for any number of clients on one event loop.

The way of a request: admitted (429 above the limit) -> through the door (`Door`) -> rendered and tokenised in a thread
-> media loaded by their pool -> expanded and copied out in a thread -> sent to the scheduler, one message a choice ->
outputs handed to the caller.
A request is taken back, at any of these points, when its caller closes the iterator, when its time is over (504), or
when an operator aborts it (499). Answers that the scheduler already works on are aborted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from processors.families.base import ProcessedMedium, data_items
from processors.families.report import MediumReport
from vlmserve.frontend.adapters import AdapterRegistry
from vlmserve.frontend.chat_messages import Message
from vlmserve.frontend.chat_template import NO_NOTES, PromptNotes
from vlmserve.frontend.dialogue import with_media
from vlmserve.frontend.door import Door, Visit
from vlmserve.frontend.live import LiveRules
from vlmserve.frontend.live_requests import LiveRequest, LiveRequests, RequestAbortedError, take_all
from vlmserve.frontend.media import RequestMedia, same_media
from vlmserve.frontend.request_builder import RequestBuilder, TokenizedPrompt
from vlmserve.frontend.request_stats import AnswerTimes, MediaTotals, Moments, RequestStats, Timings, count_media
from vlmserve.frontend.requests import GenerateReqInput, WarmupInput, placed
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTextOutput,
    BatchTokenizedGenerateReqInput,
    EncodedItem,
    EncodeOutput,
    EncodeReqInput,
    FinishReason,
    PreparedMessage,
    SchedulerInput,
    TokenizedGenerateReqInput,
    TokenizerManagerInput,
    TokenOutput,
    rids_of,
)
from vlmserve_common.errors import BadRequestError, EngineError, EngineUnavailableError

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Plain:
    """A message that is sent as it is: without large arrays, or without a way to copy them ahead."""

    message: SchedulerInput
    hand_over: Callable[[SchedulerInput], None]

    def send(self) -> None:
        self.hand_over(self.message)

    def discard(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceOutput:
    """New text of choice `index` of a request. media: reports on the request's media, in prompt order.

    timings: as of the choice's first output; complete in its last one. notes: about the prompt. prompt_ids: int64 [L],
    if the request asks for token ids.
    """

    index: int
    output: TokenOutput
    media: tuple[MediumReport, ...] = ()
    notes: PromptNotes = NO_NOTES
    timings: Timings | None = None
    prompt_ids: np.ndarray | None = None


@dataclass(slots=True)
class _Choice:
    """One answer under way at the scheduler."""

    rid: str
    index: int
    outputs: asyncio.Queue[ChoiceOutput | Exception]
    times: AnswerTimes
    request: GenerateReqInput
    notes: PromptNotes
    media: tuple[MediumReport, ...]
    held: tuple[ProcessedMedium, ...] = ()  # whose patches the scheduler may still ask for
    prompt_ids: np.ndarray | None = None
    timings: Timings | None = None
    last: TokenOutput | None = None


_Request: TypeAlias = LiveRequest[ChoiceOutput]


class TokenizerManager:
    """Serves `generate` calls of one event loop. `handle` takes the other processes' messages.

    send: hands a message to the scheduler. prepare: does the same in two halves; the first one copies arrays, in any
    thread. max_pending: most choices that wait, run or are being prepared; beyond it requests get 429. observe:
    called with the outcome of each choice. observe_tokens: called for each output with its number of tokens and the
    seconds since the tokens before (None for a choice's first). request_timeout_s: most seconds of a request; 0 is no
    limit.
    """

    def __init__(
        self,
        *,
        builder: RequestBuilder,
        media: RequestMedia,
        send: Callable[[SchedulerInput], None],
        prepare: Callable[[SchedulerInput], PreparedMessage] | None = None,
        max_pending: int,
        observe: Callable[[RequestStats], None] | None = None,
        request_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.builder = builder
        self.door = Door()
        self._media = media
        self._send = send
        self._prepare = prepare
        self.observe = observe
        self.weight_version = "default"  # the name that a trainer gave the weights
        self.adapters: AdapterRegistry | None = None
        self.observe_tokens: Callable[[int, float | None], None] | None = None
        self._clock = clock
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="vlmserve-tokenize")
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="vlmserve-count")  # no answer waits for these
        self._unavailable: str | None = None
        self._suspended: dict[str, str] = {}
        self._live: LiveRequests[ChoiceOutput] = LiveRequests(max_pending, timeout_s=request_timeout_s, clock=clock)
        self._choices: dict[str, _Choice] = {}
        self._warmups: dict[str, asyncio.Future[EncodeOutput]] = {}

    @property
    def num_pending(self) -> int:
        """Return the number of choices that have not ended: zero when idle."""
        return self._live.num_pending

    @property
    def unavailable(self) -> str | None:
        """Return why the engine cannot answer now, or None if it can."""
        return self._unavailable or next(iter(self._suspended.values()), None)

    @property
    def no_engine(self) -> str | None:
        """Return why the engine cannot be asked anything, or None if it can."""
        return self._unavailable or self._suspended.get("")

    @property
    def is_gone(self) -> bool:
        """Return whether the engine will never answer again."""
        return self._unavailable is not None

    def retry_after_s(self) -> int:
        """Estimate the time until there is room for another answer, in whole seconds, at least 1."""
        return self._live.retry_after_s()

    def suspend(self, reason: str | None, by: str = "") -> None:
        """Refuse requests with 503 for the time being; those under way go on waiting. None: take them again, as far as
        `by` is concerned."""
        if reason is None:
            self._suspended.pop(by, None)
        else:
            self._suspended[by] = reason

    def abort(self, request_id: str | None, *, inside: bool = False) -> list[LiveRequest[ChoiceOutput]]:
        """End a request at whatever stage, or all requests (None); returns the requests ended. inside: only those that
        are not in front of the door."""
        found = [one for one in self._live.find(request_id) if one.is_inside or not inside]
        for request in found:
            self._end(request, RequestAbortedError("the request was aborted by an operator"), "abort")
        return found

    def fail(self, reason: str) -> None:
        """Give up the engine: requests under way fail now, later ones are refused, all with 503. May be repeated."""
        self._unavailable = reason
        for choice in self._choices.values():
            choice.outputs.put_nowait(EngineUnavailableError(reason))
            self._report(choice, "error")
        self._choices.clear()
        for warmup in self._warmups.values():
            if not warmup.done():
                warmup.set_exception(EngineUnavailableError(reason))
        self._warmups.clear()

    def close(self) -> None:
        """Stop the threads; `generate` must not be called any more."""
        for executor in (self._executor, self._counting):
            executor.shutdown(wait=False, cancel_futures=True)

    async def generate(self, request: GenerateReqInput) -> AsyncGenerator[ChoiceOutput, None]:
        """Yield the outputs of all choices as they come, each choice's last one with a finish_reason. See `stream`."""
        async with aclosing(self.stream(request)) as batches:
            async for items in batches:
                for item in items:
                    yield item

    async def stream(
        self, *requests: GenerateReqInput, visit: Visit | None = None
    ) -> AsyncGenerator[list[ChoiceOutput], None]:
        """Yield lists of all outputs that came since the last list. Each choice's last output has a finish_reason.

        Several requests go to the scheduler as one message, and fail as one. Their choices are numbered through. Media
        that are the same in all of them are loaded once. visit: what they belong to, together with other calls.

        Close the iterator (`contextlib.aclosing`) to abort. Raises, before the first output or later, BadRequestError
        for the client's mistakes (429 when full), EngineUnavailableError (503) and EngineError (500).
        """
        self._check_available()
        left, named = sum(request.num_choices for request in requests), requests[0]
        async with self._entered(named, left) as state:
            self._live.limit_time(state, named.timeout_s, lambda error: self._end(state, error, "timeout"))
            try:
                await state.interruptible(self._enter(state, visit))
                await state.interruptible(self._submit(requests, state))
                while left:
                    items, failure = _until_failure(await take_all(state.outputs))
                    left -= sum(item.output.finish_reason is not None for item in items)
                    if items:
                        yield items
                    if failure is not None:
                        raise failure
            finally:
                self._take_back(state, "abort")

    @asynccontextmanager
    async def _entered(self, request: GenerateReqInput | WarmupInput, n: int) -> AsyncIterator[_Request]:
        """Let in a request for n answers (see `LiveRequests.entered`), with its adapter in memory. In the end it leaves
        through the door, if it has passed it."""
        using = nullcontext() if self.adapters is None else self.adapters.used(request.adapter)
        async with using:
            with self._live.entered(request.request_id, n) as state:
                try:
                    yield state
                finally:
                    if state.is_inside:
                        state.is_inside = False
                        self.door.leave()

    async def _enter(self, state: _Request, visit: Visit | None = None) -> None:
        """Wait in front of the door, which may be closed for long."""
        await self.door.pass_through(visit)
        state.is_inside = True
        self._check_available()

    async def prompt_ids(self, request: GenerateReqInput) -> np.ndarray:
        """Return the ids of a prompt that will not be answered, int64 [L], media included. Raises as `generate`
        does."""
        self._check_available()
        with self._live.entered(request.request_id, 1) as state:
            return await state.interruptible(self._prompt_ids(request))

    async def _prompt_ids(self, request: GenerateReqInput) -> np.ndarray:
        tokenize = partial(self.builder.tokenize_alone, request)
        prompt = await asyncio.get_running_loop().run_in_executor(self._counting, tokenize)
        media = await self._load(prompt, Moments(started=self._clock()))
        return (await self._in_thread(self.builder.expand, prompt, media)).input_ids

    async def warm_up(self, request: WarmupInput) -> tuple[EncodedItem, ...]:
        """Encode media ahead of time and report on each one, once all are encoded and, if there is a disk, saved.

        Cancel it to call the work off. Raises as `generate` does.
        """
        self._check_available()
        async with self._entered(request, 1) as state:
            await state.interruptible(self._enter(state))
            return await state.interruptible(self._warm_up(request))

    async def load_media(self, request: WarmupInput) -> list[Message]:
        """Return messages with their media loaded and processed, for later requests. Raises as `generate` does."""
        self._check_available()
        with self._live.entered(request.request_id, 1) as state:
            return await state.interruptible(self._load_media(request))

    def live_rules(
        self,
        fps: float | None = None,
        *,
        keep_seconds: float | None = None,
        max_tokens: int | None = None,
        slides: bool = False,
    ) -> LiveRules:
        """See `RequestMedia.live_rules`."""
        return self._media.live_rules(fps, keep_seconds=keep_seconds, max_tokens=max_tokens, slides=slides)

    async def _load_media(self, request: WarmupInput) -> list[Message]:
        named = await self._in_thread(
            self._media.named_in,
            request.messages,
            request.mm_processor_kwargs,
            self.builder.limits.counts,
            request.find_file,
            reserved=self.builder.placeholders,
        )
        loaded = await self._media.load(named, client=request.client, tenant=request.tenant)
        return with_media(request.messages, loaded)

    async def _warm_up(self, request: WarmupInput) -> tuple[EncodedItem, ...]:
        rid = request.request_id
        try:
            named = await self._in_thread(
                self._media.media_of,
                request.messages,
                request.mm_processor_kwargs,
                self.builder.limits.counts,
                request.find_file,
            )
            loaded = await self._media.load(named, client=request.client, tenant=request.tenant)
            items = tuple(item for medium in loaded for item in data_items(medium, self._media.merge_size))
            waiter: asyncio.Future[EncodeOutput] = asyncio.get_running_loop().create_future()

            def register(_: object) -> None:
                self._warmups[rid] = waiter

            message = EncodeReqInput(rid=rid, items=items, pin=request.pin, adapter=request.adapter)
            await self._hand_over(lambda: message, register, large=True)
            output = await waiter
            if output.error is not None:
                raise _error_of(output.error)
            return output.items
        finally:
            if self._warmups.pop(rid, None) is not None:
                self._send(AbortReq(rid=rid))

    def handle(self, message: TokenizerManagerInput) -> None:
        """Take a message of the detokenizer (or, passed on by it, the scheduler). Never raises for unknown rids."""
        if isinstance(message, BatchTextOutput):
            for output in message.outputs:
                self._handle_output(output)
        elif isinstance(message, EncodeOutput):
            warmup = self._warmups.pop(message.rid, None)
            if warmup is not None and not warmup.done():
                warmup.set_result(message)
        else:
            for rid in message.rids:
                self._lose(rid, message.message)

    def _end(self, state: _Request, error: Exception, finish: str) -> None:
        """End a request before its time; its slots do not wait for its client to read the error."""
        self._take_back(state, finish)
        state.end(error)

    def _take_back(self, state: _Request, finish: str) -> None:
        for rid in state.rids:
            choice = self._choices.pop(rid, None)
            if choice is not None:
                self._report(choice, finish)
                self._send(AbortReq(rid=rid))

    async def _submit(self, requests: Sequence[GenerateReqInput], state: _Request) -> None:
        prompts = await self._in_thread(self._tokenize, requests)
        moments, media = Moments(started=state.started), list[Sequence[ProcessedMedium]]()
        for prompt in prompts:
            shared = bool(media) and same_media(prompt.media, prompts[0].media)
            with placed(prompt.request.place):
                media.append(media[0] if shared else await self._load(prompt, moments))
        choices = [
            (prompt, report, tuple(medium for medium in loaded if medium.parts))
            for prompt, loaded in zip(prompts, media, strict=True)
            for report in [self._media.report(prompt.media, loaded)]
            for _ in range(prompt.request.num_choices)
        ]

        prompt_ids: list[np.ndarray] = []

        def make() -> SchedulerInput:
            messages: list[TokenizedGenerateReqInput] = []
            for prompt, loaded in zip(prompts, media, strict=True):
                with placed(prompt.request.place):
                    messages += self.builder.build(prompt, loaded)
            prompt_ids.extend(message.input_ids for message in messages)
            return messages[0] if len(messages) == 1 else BatchTokenizedGenerateReqInput(requests=tuple(messages))

        def register(rids: Sequence[str]) -> None:
            moments.prepared = self._clock()
            for index, (rid, (prompt, report, held)) in enumerate(zip(rids, choices, strict=True)):
                self._choices[rid] = _Choice(
                    rid=rid,
                    index=index,
                    outputs=state.outputs,
                    times=AnswerTimes(moments),
                    request=prompt.request,
                    notes=prompt.notes,
                    media=report,
                    held=held,
                    prompt_ids=prompt_ids[index] if prompt.request.return_token_ids else None,
                )
                state.rids.append(rid)

        await self._hand_over(make, register, large=any(media))

    def _tokenize(self, requests: Sequence[GenerateReqInput]) -> list[TokenizedPrompt]:
        prompts = []
        for request in requests:
            with placed(request.place):
                prompts.append(self.builder.tokenize(request, default_seed=secrets.randbits(63)))
        return prompts

    async def _load(self, prompt: TokenizedPrompt, moments: Moments) -> Sequence[ProcessedMedium]:
        if not prompt.media:
            return []
        moments.load_began = moments.load_began or self._clock()
        return await self._media.load(
            prompt.media,
            client=prompt.request.client,
            tenant=prompt.request.tenant,
            fetched=lambda: setattr(moments, "fetched", self._clock()),
        )

    async def _hand_over(
        self, make: Callable[[], SchedulerInput], register: Callable[[Sequence[str]], None], *, large: bool
    ) -> None:
        """Make a message in a thread and send it. register: called with its rids before the send, when nothing can go
        wrong any more. large: the message holds arrays, which the thread copies, too."""
        made = asyncio.get_running_loop().run_in_executor(self._executor, self._make, make, large)
        try:
            rids, prepared = await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_discard)
            raise
        if self.unavailable is not None:
            prepared.discard()
        self._check_available()
        register(rids)
        prepared.send()

    def _make(self, make: Callable[[], SchedulerInput], large: bool) -> tuple[Sequence[str], PreparedMessage]:
        message = make()
        copied = self._prepare(message) if large and self._prepare is not None else _Plain(message, self._send)
        return rids_of(message), copied

    async def _in_thread(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))

    def _handle_output(self, output: TokenOutput) -> None:
        choice = self._choices.get(output.rid)
        if choice is None:  # its client is gone
            return
        choice.last = output
        now, finish = self._clock(), output.finish_reason
        gap = choice.times.output(now, output.stages, tokens=len(output.token_ids))
        if output.token_ids and self.observe_tokens is not None:
            self.observe_tokens(len(output.token_ids), gap)
        if choice.timings is None or finish is not None:
            choice.timings = choice.times.timings(now, ended_here=output.stages is None)
        if finish is not None:
            del self._choices[output.rid]
            self._report(choice, finish.type, choice.timings, status=finish.status if finish.type == "error" else None)
        if finish is not None and finish.type in ("error", "abort"):
            choice.outputs.put_nowait(_error_of(finish))
        else:
            choice.outputs.put_nowait(
                ChoiceOutput(
                    index=choice.index,
                    output=output,
                    media=choice.media,
                    notes=choice.notes,
                    timings=choice.timings,
                    prompt_ids=choice.prompt_ids,
                )
            )

    def _lose(self, rid: str, reason: str) -> None:
        """End an answer of which a message got lost, here and at the scheduler."""
        choice, warmup = self._choices.pop(rid, None), self._warmups.pop(rid, None)
        if choice is not None:
            self._report(choice, "error")
            choice.outputs.put_nowait(EngineError(reason))
        elif warmup is not None and not warmup.done():
            warmup.set_exception(EngineError(reason))
        else:  # its client is gone, and it was aborted
            return
        self._send(AbortReq(rid=rid))

    def _report(
        self, choice: _Choice, finish: str, timings: Timings | None = None, *, status: int | None = None
    ) -> None:
        """Tell the observers the outcome of a choice. timings: None if this process ended it."""
        tell = [one for one in (self.observe, choice.request.ended) if one is not None]
        if not tell:
            return
        last, first = choice.last, choice.index == 0
        stats = RequestStats(
            rid=choice.rid,
            finish=finish,
            status=status,
            prompt_tokens=last.prompt_tokens if last and first else 0,
            cached_tokens=last.cached_tokens if last and first else 0,
            completion_tokens=last.completion_tokens if last else 0,
            timings=timings or choice.times.timings(self._clock(), ended_here=True),
            media=count_media(choice.media) if first else MediaTotals(),
        )
        for one in tell:
            one(stats)

    def _check_available(self) -> None:
        if self.unavailable is not None:
            raise EngineUnavailableError(self.unavailable)


def _until_failure(items: list[ChoiceOutput | Exception]) -> tuple[list[ChoiceOutput], Exception | None]:
    """Return the outputs before the first failure, and the failure."""
    outputs: list[ChoiceOutput] = []
    for item in items:
        if isinstance(item, Exception):
            return outputs, item
        outputs.append(item)
    return outputs, None


def _error_of(finish: FinishReason) -> BadRequestError | EngineError:
    """Make the exception of a request that the engine ended without an answer."""
    what = "aborted" if finish.type == "abort" else "failed on"
    message = finish.message or f"the engine {what} this request"
    bad = finish.type == "error" and 400 <= finish.status < 500
    return BadRequestError(message, status=finish.status, param=finish.param) if bad else EngineError(message)


def _discard(made: asyncio.Future[tuple[Any, PreparedMessage]]) -> None:
    """Free the message of a request that was given up while it was being prepared."""
    if not made.cancelled() and made.exception() is None:
        made.result()[1].discard()
