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
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from processors.families.base import ProcessedMedium
from processors.families.report import MediumReport, report_json
from processors.fetch.limits import FetchSettings
from vlmserve.commands.offline.adapters import OfflineAdapters
from vlmserve.commands.offline.inputs import (
    ChatOptions,
    Conversation,
    EngineSettings,
    PooledInput,
    SamplingOptions,
    check_messages,
    conversation,
    keywords_named,
    listed,
    pooled_content,
    read_settings,
    sampling_of,
)
from vlmserve.commands.offline.session import Kept, Session
from vlmserve.commands.offline.weights import OfflineWeights
from vlmserve.config.checks import check_engine_args
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.fields import flag
from vlmserve.config.model_path import checked_model
from vlmserve.engine.adapters import EngineAdapters, engine_adapters
from vlmserve.engine.build import EngineInfo, build_loop, build_runner
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.step import GroupsWorker, ModelWorker
from vlmserve.engine.weights.changing import EngineWeights
from vlmserve.engine.weights.rank import RankWeights
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.frontend.chat_messages import Message
from vlmserve.frontend.detokenizer import DetokenizerManager, join_outputs
from vlmserve.frontend.dialogue import with_media
from vlmserve.frontend.pooled import embed_fields, embed_prompt, relevance, rerank_fields, rerank_prompt
from vlmserve.frontend.request_builder import (
    ChatPrompt,
    EmbedsPrompt,
    GenerateReqInput,
    TextPrompt,
    TokenizedPrompt,
    TokensPrompt,
)
from vlmserve.frontend.requests import Prompt, placed
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
from vlmserve.ipc.weight_messages import WeightsOrder
from vlmserve_common.errors import BadRequestError, EngineError, RankLostError
from vlmserve_common.process.loop_thread import LoopThread

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class OfflineEngine:
    """The engine's parts. args: with the model's folder. stack: closes the loop and its encoders, after
    `stage.media`. adapters: those of --lora-paths are loaded; lora: in the engine, if it takes any. ranks: the
    connection to the other ranks of the model, if there are any."""

    args: EngineArgs
    runner: ModelRunner
    info: EngineInfo
    loop: EventLoop
    weights: EngineWeights
    stage: TokenizerStage
    stack: ExitStack
    adapters: OfflineAdapters
    lora: EngineAdapters | None = None
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
        args, runner, info, worker, ranks, tell = _runner(args, stack, log_level)
        # for arrays that go to and from encoder and media processes, where there are any
        processes = args.num_encoders + args.media_processes
        shared = stack.enter_context(PrivateDirectory(shared_memory_base())) if processes else None
        start = None if shared is None else StartSettings(shared_dir=shared.path, log_level=log_level)
        loop = build_loop(args, runner, info, send, start=start, worker=worker)
        stack.callback(loop.close)
        own = RankWeights(args, runner, write_tower=loop.encoder.write_tower)
        weights = EngineWeights(loop, own, ranks=ranks, tell=tell)
        stage = make_tokenizer_stage(
            args, limits, max_model_len=info.max_req_len, auto_pixels=info.auto_pixels, start=start
        )
        lora = engine_adapters(args, runner, loop, worker, ranks)
        adapters = OfflineAdapters(lora, args.allowed_lora_path)
        for name, folder in args.adapters_at_start:
            adapters.load(name, folder, trusted=True)
        return OfflineEngine(
            args=args,
            runner=runner,
            info=info,
            loop=loop,
            weights=weights,
            stage=stage,
            stack=stack.pop_all(),
            adapters=adapters,
            lora=lora,
            ranks=ranks,
        )


def _runner(
    args: EngineArgs, stack: ExitStack, log_level: str
) -> tuple[
    EngineArgs, ModelRunner, EngineInfo, ModelWorker | GroupsWorker | None, Ranks | None, Callable[[WeightsOrder], None]
]:
    """Build this process's part of the model, and the worker that computes steps together with other ranks, with the
    function that gives them other orders. stack: ends all."""
    if args.world_size == 1:
        return args, *build_runner(args), None, None, _nobody
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
    worker = leading_worker(runner, ranks, partial(processes.who_died, LAST_WORDS_S))
    return own, runner, info, worker, ranks, worker.tell


def _nobody(order: WeightsOrder) -> None:
    """Tell an order to the other ranks, of which there are none."""


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


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """index: a document's place among those given. score: between 0 and 1."""

    index: int
    score: float


class LLM(AbstractContextManager["LLM"]):
    """A model loaded into this process.

        with LLM("Qwen/Qwen3-VL-2B-Instruct") as llm:
            print(llm.chat("What is this?", images=["cat.png"], max_tokens=64).text)

    model: as in `EngineArgs`; without one, the small model that comes with the package.
    settings: any field of `EngineArgs`, also by the names of vLLM and SGLang, and max_images_per_request and
    max_videos_per_request. fetch: what picture URLs may reach. Raises CheckpointError, EngineError or SettingsError.
    Not thread-safe. engine: the parts of the engine, to measure them one by one. weights: changes them, and gives
    memory back.
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
        self.weights = OfflineWeights(engine.weights)
        self._media, self.builder, self._adapters = engine.stage.media, engine.stage.builder, engine.adapters
        self._loop = LoopThread("media")
        self._stack.callback(self._loop.close)
        self._stack.callback(lambda: self._loop.run(self._media.close()))
        self._detokenizer = DetokenizerManager(engine.stage.tokenizer)
        self._answers: dict[str, TokenOutput | None] = {}  # so far
        self._max_waiting = min(self.args.max_running_requests, self.args.max_queued_requests)
        self._requests = self._sessions = 0
        self._closed = False

    def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """Answer one conversation: a text, or messages in OpenAI's form.

        Media may be paths, URLs, bytes, PIL images and arrays. A path in a message is read, so never pass on messages
        of strangers. images, videos, audios: one or several, before the text. options: sampling as keywords, such as
        max_tokens=64, and num_logprobs, mm_processor_kwargs, returns, logits_processors and lora, an adapter's name
        (`ChatOptions`).
        """
        return self.chat_batch([conversation(messages, images, videos, audios)], sampling, **options)[0]

    def chat_batch(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        loras: Sequence[str | None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Answer several conversations, computed together, in order. Raises BadRequestError for the first bad one.
        loras: an adapter's name, or None, for each of them; by default that of the options."""
        if isinstance(conversations, str):
            raise TypeError("chat_batch takes a list of conversations; chat takes one")
        prompts = [ChatPrompt(messages=conversation(messages)) for messages in conversations]
        request, lora = _request(sampling, options), options.get("lora")
        if loras is not None and len(loras) != len(prompts):
            raise TypeError(f"{len(loras)} loras for {len(prompts)} conversations")
        return [
            answer
            for [answer] in self._run(
                [
                    self._adapters.adapted(replace(request, prompt=prompt), name)
                    for prompt, name in zip(prompts, loras or [lora] * len(prompts), strict=True)
                ]
            )
        ]

    def generate(
        self,
        prompts: str | Sequence[str | TextPrompt | TokensPrompt | EmbedsPrompt],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Continue prompts that are rendered already. A single text gives a list of one."""
        several = [prompts] if isinstance(prompts, str) else prompts
        wrapped = [TextPrompt(text=prompt) if isinstance(prompt, str) else prompt for prompt in several]
        request = self._adapters.adapted(_request(sampling, options), options.get("lora"))
        return [answer for [answer] in self._run([replace(request, prompt=prompt) for prompt in wrapped])]

    def session(
        self,
        system: str | None = None,
        *,
        fps: float | None = None,
        keep_seconds: float | None = None,
        max_video_tokens: int | None = None,
        window: Literal["exact", "sliding"] = "exact",
        **options: Unpack[ChatOptions],
    ) -> Session:
        """Open a conversation that the session holds: media are prepared, and tokens computed, when they are appended.
        system: the text of a system message. options: as of `chat`, for all that is appended and asked.

        Of live video (`Session.show`), fps frames a second are used, and keep_seconds and max_video_tokens are the
        most that stays. None: the usual rate of clips, and no limit. window: "exact" computes what stays as a prompt
        without what has left, and "sliding" keeps its KV, so answers are near that."""
        live = self._media.live_rules(
            fps, keep_seconds=keep_seconds, max_tokens=max_video_tokens, slides=window == "sliding"
        )
        self._sessions += 1
        return Session(f"offline {self._sessions}", self._load, self._answer, live=live, system=system, options=options)

    @keywords_named()
    def _load(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[Message]:
        """Return messages with their media processed."""
        check_messages(messages)
        media = self._media.named_in(messages, kwargs, self.builder.limits.counts, reserved=self.builder.placeholders)
        return with_media(messages, self._loop.run(self._media.load(media)))

    def _answer(
        self, prompts: Sequence[ChatPrompt], sampling: SamplingParams | None, options: Mapping[str, Any], kept: Kept
    ) -> list[Completion]:
        request = self._adapters.adapted(_request(sampling, options), options.get("lora"))
        request = replace(
            request, session_id=kept.name, cache_salt=kept.cache_salt, slid=kept.slid, warnings=kept.warnings
        )
        return [answer for [answer] in self._run([replace(request, prompt=prompt) for prompt in prompts])]

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

    def embed(
        self,
        inputs: PooledInput | TokensPrompt | Sequence[PooledInput | TokensPrompt],
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora: str | None = None,
    ) -> np.ndarray:
        """Return a vector of each input, float32 [inputs, dimensions].

        An input is a text, {"image": "cat.png"}, {"text": ..., "image": ..., "video": ...} in the order of its keys,
        parts in OpenAI's form in {"content": ...}, or token ids. instruction, normalize: in place of the checkpoint's.
        dimensions: the first ones. lora: an adapter's name. Raises BadRequestError for the first bad input, and for a
        model that embeds nothing.
        """
        task = self.builder.limits.task

        def prompt(one: PooledInput | TokensPrompt) -> Prompt:
            return one if isinstance(one, TokensPrompt) else embed_prompt(task, pooled_content(one), instruction)

        asked = embed_fields(task, dimensions=dimensions, normalize=normalize)
        answers = self._pooled("inputs", listed(inputs), prompt, asked, mm_processor_kwargs, lora)
        rows = [answer.hidden_states for answer in answers]
        return np.concatenate([row for row in rows if row is not None])

    def rerank(
        self,
        query: PooledInput,
        documents: Sequence[PooledInput],
        *,
        instruction: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora: str | None = None,
    ) -> list[RankedDocument]:
        """Return the documents by their scores for a query, the best one first. See `embed` for their forms."""
        task, wanted = self.builder.limits.task, pooled_content(query)

        def prompt(one: PooledInput) -> Prompt:
            return rerank_prompt(task, wanted, pooled_content(one), instruction)

        asked = rerank_fields(task)
        answers = self._pooled("documents", listed(documents), prompt, asked, mm_processor_kwargs, lora)
        ranked = [RankedDocument(index, relevance(answer.logprobs)) for index, answer in enumerate(answers)]
        return sorted(ranked, key=lambda one: -one.score)

    @keywords_named()
    def _pooled(
        self,
        name: str,
        given: Sequence[Any],
        prompt: Callable[[Any], Prompt],
        asked: Mapping[str, Any],
        knobs: Mapping[str, Any] | None,
        lora: str | None,
    ) -> list[Completion]:
        """name: of the argument whose entries are given."""
        if not given:
            raise TypeError(f"{name} is an empty list; it must have an entry")
        self.builder.limits.task.check(asked["task"])
        request = replace(_request(None, {"mm_processor_kwargs": knobs}), **asked)
        request, wanted = self._adapters.adapted(request, lora), []
        for index, one in enumerate(given):
            with placed(place := f"{name}[{index}]"):
                wanted.append(replace(request, prompt=prompt(one), place=place))
        return [answer for [answer] in self._run(wanted)]

    def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, a folder of PEFT, under a new name, which `lora=NAME` chooses. Raises CheckpointError if
        it does not fit the model, and EngineError for a name that is taken, or without enable_lora."""
        self._adapters.load(name, str(path))

    def unload_lora_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. EngineError if there is none of this name."""
        self._adapters.unload(name)

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
        self.weights.check_there()
        about: dict[str, tuple[tuple[MediumReport, ...], tuple[str, ...]]] = {}
        choices: list[list[str]] = []
        try:
            with closing(self._loading(requests)) as loadings:
                for tokenized, loading in loadings:
                    # the engine goes on meanwhile
                    while not loading.done() and not self._engine_loop.is_idle():
                        self._engine_loop.step_or_wait()
                    with placed(tokenized.request.place):
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
                    with placed(named.place):
                        if isinstance(named.prompt, ChatPrompt):
                            check_messages(named.prompt.messages)
                        tokenized = self.builder.tokenize(named, default_seed=self.args.random_seed + number)
                except BadRequestError:
                    yield from ahead  # one of these may fail, too, and comes first
                    raise
                media = tokenized.media
                while ahead and sum(1 + len(waiting.media) for waiting, _ in ahead) + len(media) >= _AHEAD:
                    yield ahead.popleft()
                ahead.append((tokenized, self._loop.start(self._media.load(media)) if media else _nothing()))
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


def _nothing() -> Future[list[ProcessedMedium]]:
    loaded: Future[list[ProcessedMedium]] = Future()
    loaded.set_result([])
    return loaded


def _request(sampling: SamplingParams | None, options: Mapping[str, Any]) -> GenerateReqInput:
    """Return the request that all requests of a call share, without its prompt and its name."""
    given = dict(options)
    names = ChatOptions.__annotations__.keys() - SamplingOptions.__annotations__
    own = {name: given.pop(name) for name in names & given.keys()}
    own.pop("lora", None)
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
