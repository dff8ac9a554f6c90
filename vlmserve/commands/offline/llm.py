"""The offline engine: the same stages as the server, in one process and without sockets."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from processors.families.base import ProcessedMedium
from processors.families.report import MediumReport, report_json
from processors.fetch.limits import FetchSettings
from vlmserve.commands.offline.inputs import (
    ChatOptions,
    Conversation,
    EngineSettings,
    SamplingOptions,
    check_messages,
    conversation,
    keywords_named,
    read_settings,
    sampling_of,
)
from vlmserve.config.checks import check_engine_args
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.fields import flag
from vlmserve.config.model_path import checked_model
from vlmserve.engine.build import EngineInfo, build_loop, build_runner
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.step import GroupsWorker, ModelWorker
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.frontend.detokenizer import DetokenizerManager, join_outputs
from vlmserve.frontend.request_builder import (
    ChatPrompt,
    EmbedsPrompt,
    GenerateReqInput,
    TextPrompt,
    TokenizedPrompt,
    TokensPrompt,
)
from vlmserve.frontend.scores import LabelScore, label_scores
from vlmserve.frontend.stage import StageLimits, TokenizerStage, make_tokenizer_stage
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenOutput,
    Guesses,
    PromptLogprobs,
    SamplingParams,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
    TokenOutput,
)
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base, socket_base
from vlmserve_common.errors import BadRequestError, EngineError, RankLostError
from vlmserve_common.process.loop_thread import LoopThread

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class OfflineEngine:
    """The engine's parts. args: with the model's folder. stack: closes the loop and its encoders, after
    `stage.media`. ranks: the connection to the other ranks of the model, if there are any."""

    args: EngineArgs
    runner: ModelRunner
    info: EngineInfo
    loop: EventLoop
    stage: TokenizerStage
    stack: ExitStack
    ranks: Ranks | None = None


def build_offline_engine(
    args: EngineArgs, limits: StageLimits, send: Callable[[SchedulerOutput], None], *, log_level: str = "info"
) -> OfflineEngine:
    """Build an engine in this process.

    send: gets the outputs of every step. log_level: of helper processes. Raises CheckpointError, EngineError or
    SettingsError.
    """
    check_engine_args(args)
    if args.num_replicas > 1:
        raise EngineError(
            f"{flag('dp_size')} is {args.dp_size}: only a server has several replicas; start `vlmserve serve` with it "
            "and send it requests, or make one engine on each device"
        )
    if args.role != "all":
        raise EngineError(f"{flag('role')} is {args.role!r}: only a server has a part of the work")
    args = replace(args, model=str(checked_model(args)))
    with ExitStack() as stack:
        args, runner, info, worker, ranks = _runner(args, stack, log_level)
        # for arrays that go to and from encoder and media processes, where there are any
        processes = args.num_encoders + args.media_processes
        shared = stack.enter_context(PrivateDirectory(shared_memory_base())) if processes else None
        start = None if shared is None else StartSettings(shared_dir=shared.path, log_level=log_level)
        loop = build_loop(args, runner, info, send, start=start, worker=worker)
        stack.callback(loop.close)
        stage = make_tokenizer_stage(
            args, limits, max_model_len=info.max_req_len, auto_pixels=info.auto_pixels, start=start
        )
        return OfflineEngine(
            args=args,
            runner=runner,
            info=info,
            loop=loop,
            stage=stage,
            stack=stack.pop_all(),
            ranks=ranks,
        )


def _runner(
    args: EngineArgs, stack: ExitStack, log_level: str
) -> tuple[EngineArgs, ModelRunner, EngineInfo, ModelWorker | GroupsWorker | None, Ranks | None]:
    """Build this process's part of the model, and the worker that computes steps together with other ranks. stack: ends
    both."""
    if args.world_size == 1:
        return args, *build_runner(args), None, None
    # only ranks need this module
    from vlmserve.engine.rank_processes import (
        LAST_WORDS_S,
        RankProcesses,
        join_ranks,
        leading_worker,
        meeting_place,
        rank_args,
    )

    own = rank_args(args, 0)
    folder = stack.enter_context(PrivateDirectory(socket_base())).path
    timeout_s = StartSettings(shared_dir=folder).startup_timeout_s
    start = StartSettings(shared_dir=folder, startup_timeout_s=timeout_s, ready_by=time.monotonic() + timeout_s)
    place = meeting_place(folder, args, start)
    processes = RankProcesses(args, place, log_level)
    stack.callback(processes.stop)
    try:
        ranks = join_ranks(own, 0, place, processes.check)
        stack.callback(ranks.close)
        runner, info = build_runner(own, ranks)
    except RankLostError:
        processes.check(LAST_WORDS_S)
        raise
    processes.wait_ready()
    return own, runner, info, leading_worker(runner, ranks, partial(processes.who_died, LAST_WORDS_S)), ranks


_AHEAD = 16
"""Requests that wait with their media loaded while the engine computes, and these media, together."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer. finish_reason: "stop" or "length". logprobs: one entry for each token, with num_logprobs.
    prompt_logprobs and hidden_states (float32 [tokens, hidden]): see `ReturnOptions`.

    mm_report: the API's report on the prompt's media. warnings: parts of the request without effect, a sentence each.
    guesses: tokens of the answer that were guessed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    mm_report: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states: np.ndarray | None = None
    guesses: Guesses = field(default_factory=Guesses)


class LLM(AbstractContextManager["LLM"]):
    """A model loaded into this process.

        with LLM("Qwen/Qwen3-VL-2B-Instruct") as llm:
            print(llm.chat("What is this?", images=["cat.png"], max_tokens=64).text)

    model: as in `EngineArgs`; without one, the small model that comes with the package.
    settings: any field of `EngineArgs`, also by the names of vLLM and SGLang, and max_images_per_request and
    max_videos_per_request. fetch: what picture URLs may reach. Raises CheckpointError, EngineError or SettingsError.
    Not thread-safe. engine: the parts of the engine, to measure them one by one.
    """

    @keywords_named()
    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        fetch: FetchSettings | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        engine = self.engine = build_offline_engine(*read_settings(model, fetch, settings), self._take)
        self.args, self.info, self._runner = engine.args, engine.info, engine.runner
        self._engine_loop, self._stack = engine.loop, engine.stack
        self._media, self.builder = engine.stage.media, engine.stage.builder
        self._loop = LoopThread("media")
        self._stack.callback(self._loop.close)
        self._stack.callback(lambda: self._loop.run(self._media.close()))
        self._detokenizer = DetokenizerManager(engine.stage.tokenizer)
        self._answers: dict[str, TokenOutput | None] = {}  # so far
        self._max_waiting = min(self.args.max_running_requests, self.args.max_queued_requests)
        self._requests = 0
        self._closed = False

    def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        images: Any = (),
        videos: Any = (),
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """Answer one conversation: a text, or messages in OpenAI's form.

        Media may be paths, URLs, bytes, PIL images and arrays. A path in a message is read, so never pass on messages
        of strangers. images, videos: one or several, before the text. options: sampling as keywords, such as
        max_tokens=64, and num_logprobs, mm_processor_kwargs, returns and logits_processors (`ChatOptions`).
        """
        return self.chat_batch([conversation(messages, images, videos)], sampling, **options)[0]

    def chat_batch(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Answer several conversations, computed together, in order. Raises BadRequestError for the first bad one."""
        if isinstance(conversations, str):
            raise TypeError("chat_batch takes a list of conversations; chat takes one")
        prompts = [ChatPrompt(messages=conversation(messages)) for messages in conversations]
        request = _request(sampling, options)
        return [answer for [answer] in self._run([replace(request, prompt=prompt) for prompt in prompts])]

    def generate(
        self,
        prompts: str | Sequence[str | TextPrompt | TokensPrompt | EmbedsPrompt],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Continue prompts that are rendered already. A single text gives a list of one."""
        several = [prompts] if isinstance(prompts, str) else prompts
        wrapped = [TextPrompt(text=prompt) if isinstance(prompt, str) else prompt for prompt in several]
        request = _request(sampling, options)
        return [answer for [answer] in self._run([replace(request, prompt=prompt) for prompt in wrapped])]

    def score(
        self,
        messages: Conversation,
        labels: Sequence[str],
        *,
        images: Any = (),
        videos: Any = (),
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[LabelScore]:
        """Return how likely each of some answers to a conversation is, in their order; see `chat`."""
        return self.score_batch(
            [conversation(messages, images, videos)], labels, mm_processor_kwargs=mm_processor_kwargs
        )[0]

    def score_batch(
        self,
        conversations: Sequence[Conversation],
        labels: Sequence[str],
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[LabelScore]]:
        """Score several conversations together as `score` does. A conversation is computed once for all labels."""
        if isinstance(labels, str) or not labels:
            raise TypeError("labels are one or more texts in a list")
        request = _request(None, {"mm_processor_kwargs": mm_processor_kwargs})
        prompts = [ChatPrompt(messages=conversation(messages)) for messages in conversations]
        wanted = [replace(request, prompt=prompt, continuations=tuple(labels)) for prompt in prompts]
        return [label_scores(labels, [answer.prompt_logprobs for answer in answers]) for answers in self._run(wanted)]

    def stats(self) -> SchedulerStats:
        """Return figures of the engine."""
        return self._engine_loop.stats()

    def flush_cache(self) -> int:
        """Forget all cached prefixes; return how many tokens these had."""
        return self._engine_loop.flush_cache()

    def close(self) -> None:
        """End the media threads and the encoder's workers. The model goes with the object."""
        self._closed = True
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @keywords_named()
    def _run(self, requests: Sequence[GenerateReqInput]) -> list[list[Completion]]:
        if self._closed:
            raise EngineError("this LLM is closed, and computes nothing more; make a new one")
        about: dict[str, tuple[tuple[MediumReport, ...], tuple[str, ...]]] = {}
        choices: list[list[str]] = []
        try:
            with closing(self._loading(requests)) as loadings:
                for tokenized, loading in loadings:
                    # the engine goes on meanwhile
                    while not loading.done() and not self._engine_loop.is_idle():
                        self._engine_loop.step_or_wait()
                    media = loading.result()
                    messages = self.builder.build(tokenized, media)
                    report = self._media.report(tokenized.media, media)
                    choices.append([message.rid for message in messages])
                    for message in messages:
                        # only so many wait at a time, pictures and all
                        while self._engine_loop.num_waiting >= self._max_waiting:
                            self._engine_loop.step_or_wait()
                        about[message.rid] = report, tokenized.notes.warnings
                        self._answers[message.rid] = None
                        self._engine_loop.handle(message)
            while not self._engine_loop.is_idle():
                self._engine_loop.step_or_wait()
            self._engine_loop.step()  # the checks of an idle engine
            return [[_completion(self._answers[rid], *about[rid]) for rid in rids] for rids in choices]
        finally:
            for rid in about:
                answer = self._answers.pop(rid)
                if answer is None or answer.finish_reason is None:  # an exception came first
                    self._engine_loop.handle(AbortReq(rid=rid))

    def _loading(
        self, requests: Iterable[GenerateReqInput]
    ) -> Generator[tuple[TokenizedPrompt, Future[list[ProcessedMedium]]], None, None]:
        """Yield the requests and their media in order, while the media of the next ones are being loaded."""
        ahead = deque[tuple[TokenizedPrompt, Future[list[ProcessedMedium]]]]()
        try:
            for request in requests:
                number, self._requests = self._requests, self._requests + 1
                named = replace(request, request_id=f"offline-{number}")
                try:
                    if isinstance(named.prompt, ChatPrompt):
                        check_messages(named.prompt.messages)
                    tokenized = self.builder.tokenize(named, default_seed=self.args.random_seed + number)
                except BadRequestError:
                    yield from ahead  # one of these may fail, too, and comes first
                    raise
                media = tokenized.media
                while ahead and sum(1 + len(waiting.media) for waiting, _ in ahead) + len(media) >= _AHEAD:
                    yield ahead.popleft()
                ahead.append((tokenized, self._loop.start(self._media.load(media))))
            while ahead:
                yield ahead.popleft()
        finally:
            for _, loading in ahead:
                loading.cancel()

    def _take(self, batch: SchedulerOutput) -> None:
        assert isinstance(batch, BatchTokenOutput)
        texts, aborts = self._detokenizer.process(batch)
        for abort in aborts:
            self._engine_loop.handle(abort)
        for output in texts.outputs:
            if output.rid in self._answers:  # else given up
                self._answers[output.rid] = join_outputs(self._answers[output.rid], output)


def _request(sampling: SamplingParams | None, options: Mapping[str, Any]) -> GenerateReqInput:
    """Return the request that all requests of a call share, without its prompt and its name."""
    given = dict(options)
    names = ChatOptions.__annotations__.keys() - SamplingOptions.__annotations__
    own = {name: given.pop(name) for name in names & given.keys()}
    own["mm_processor_kwargs"] = own.get("mm_processor_kwargs") or {}
    own["logits_processors"] = tuple(own.get("logits_processors", ()))
    sampling_params = sampling_of(sampling, given)
    return GenerateReqInput(request_id="", prompt=TextPrompt(text=""), sampling_params=sampling_params, **own)


def _completion(answer: TokenOutput | None, media: tuple[MediumReport, ...], warnings: tuple[str, ...]) -> Completion:
    if answer is None or answer.finish_reason is None:
        raise EngineError("a request ended without an answer")
    reason = answer.finish_reason
    if reason.type == "error":
        if reason.status < 500:
            raise BadRequestError(reason.message, status=reason.status)
        raise EngineError(reason.message)
    return Completion(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=reason.type,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        logprobs=answer.logprobs,
        mm_report=report_json(media),
        warnings=(*warnings, *(warning for medium in media for warning in medium.warnings())),
        prompt_logprobs=answer.prompt_logprobs,
        hidden_states=answer.hidden_states,
        guesses=answer.guesses or Guesses(),
    )
