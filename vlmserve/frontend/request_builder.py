"""From messages or text to `TokenizedGenerateReqInput`: the part of the way that the server and the offline LLM share.

Three steps, so that a caller can load media between them as it likes: `tokenize` (template, ids, checks that need no
media), `expand` (media into the prompt), `build` (one message per choice). All are synchronous, none keeps state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from processors.families.base import ExpandedPrompt, ProcessedMedium
from processors.inputs import MultimodalInputs
from vlmserve.executor.logits_processors import LogitsProcessors
from vlmserve.frontend.chat_messages import (
    FindFile,
    MediaCounts,
    MediaRef,
    settle_media,
    to_template_messages,
    with_files,
)
from vlmserve.frontend.chat_template import NO_NOTES, ChatTemplate, PromptNotes, check_tool_use, template_kwargs
from vlmserve.frontend.input_embeds import check_input_embeds
from vlmserve.frontend.media import RequestMedia
from vlmserve.frontend.parsers.calls import ToolUse
from vlmserve.frontend.parsers.reasoning import opened_in_prompt
from vlmserve.frontend.request_stats import RequestStats
from vlmserve.frontend.sampling import (
    SamplingDefaults,
    SamplingOverrides,
    check_min_tokens,
    check_token,
    choice_seed,
    refusal,
    verify_logits_processors,
    verify_num_logprobs,
    verify_returns,
    verify_sampling_params,
    verify_start,
)
from vlmserve.frontend.structured_output import chat_grammar
from vlmserve.ipc.messages import (
    InputEmbeds,
    LogitsProcessorCall,
    ReturnOptions,
    SamplingParams,
    TokenizedGenerateReqInput,
)
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A conversation in OpenAI's form (plain dicts), to be rendered by the chat template.

    find_file: finds the uploaded files that it names; None where there are none. tool_use: None where there are no
    tools. reasoning_effort: how much the model is to think; None: as much as it does.
    """

    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    find_file: FindFile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    """A prompt that is rendered already; media[i] stands at its i-th media placeholder."""

    text: str
    media: tuple[MediaRef, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensPrompt:
    """A prompt that is tokenised already, without media."""

    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsPrompt:
    """Embeddings in place of tokens: see `tokenizer.input_embeds`."""

    embeds: InputEmbeds


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokensPrompt | EmbedsPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReqInput:
    """A request for n answers to one prompt. num_logprobs, returns, logits_processors as in TokenizedGenerateReqInput.

    mm_processor_kwargs: how its media are prepared where a part does not say (`processors.families.processor_kwargs`).
    continuations: texts to score in place of making answers: the logprobs of their tokens behind the prompt come as
    `prompt_logprobs` of a choice each.
    client: who asks; clients take turns. session_id: of the conversation whose KV is kept for its next turn (that of
    the first answer); "" is none. tenant: whose requests share cached prefixes and media with it; "": all that have
    none. cache_salt, priority, data_parallel_rank: see `TokenizedGenerateReqInput`. request_id: of its own among
    all requests ever. rid: what the client calls it, of its own among those at a time; None: the same. timeout_s:
    seconds that it may take; None: as long as it takes. ended: is told what became of each choice. warnings: what will
    not be done as it asks, a sentence each, for its answer.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    n: int = 1
    num_logprobs: int | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    client: str = ""
    returns: ReturnOptions = field(default_factory=ReturnOptions)
    logits_processors: tuple[LogitsProcessorCall, ...] = ()
    continuations: tuple[str, ...] = ()
    session_id: str = ""
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    data_parallel_rank: int | None = None
    rid: str | None = None
    timeout_s: float | None = None
    ended: Callable[[RequestStats], None] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def cache_namespace(self) -> str:
        """The salt of the prefix cache: the client's within its tenant. No tenant's is another's, whatever it sends."""
        return (
            f"{len(self.tenant)} {self.tenant} {self.cache_salt}"
            if self.tenant
            else self.cache_salt and f"0 {self.cache_salt}"
        )

    @property
    def num_choices(self) -> int:
        """Answers to make, or continuations to score."""
        return len(self.continuations) or self.n


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedPrompt:
    """A prompt's ids before media are expanded, its media, and the verified sampling parameters.

    notes: what its answers are to be read with.
    """

    ids: list[int]
    media: list[MediaRef]
    params: SamplingParams
    notes: PromptNotes = NO_NOTES


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """max_model_len: context length in tokens, prompt and answer together. vocab_size: ids of the model. hidden_size:
    elements of its embeddings.

    counts: most pictures and videos in a request. hidden_states: whether requests may ask for them. replicas: that they
    may choose from.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int = 0
    counts: MediaCounts = field(default_factory=MediaCounts)
    hidden_states: bool = False
    replicas: int = 1


def followed_by_text(media: MultimodalInputs, length: int) -> MultimodalInputs:
    """Of a prompt that is longer by so many tokens of text."""
    end = media.mrope_positions.shape[1] + media.mrope_position_delta
    text = np.broadcast_to(np.arange(end, end + length), (3, length))
    return replace(media, mrope_positions=np.concatenate([media.mrope_positions, text], axis=1))


class RequestBuilder:
    """Makes scheduler requests. Safe to share between threads.

    media_placeholders: texts of the tokens that stand for media in a prompt (every Qwen-VL family has these two).
    Written out in a message they would ask for a picture that is not there, so they are refused.
    """

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        expander: RequestMedia,
        limits: RequestLimits,
        defaults: SamplingDefaults | None = None,
        logits_processors: LogitsProcessors | None = None,
        media_placeholders: Sequence[str] = ("<|image_pad|>", "<|video_pad|>"),
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.template = template
        self._expander = expander
        self._defaults = defaults or SamplingDefaults()
        self._logits_processors = logits_processors or LogitsProcessors({})
        self._placeholders = tuple(media_placeholders)

    def tokenize(self, request: GenerateReqInput, *, default_seed: int = 0) -> TokenizedPrompt:
        """Check, render and tokenise. Raises BadRequestError (parameters, messages, context_length_exceeded).

        default_seed: used where the request brings no seed.
        """
        self._check_replica(request.data_parallel_rank)
        verify_num_logprobs(request.num_logprobs)
        params = self._defaults.apply(request.sampling)
        returns, vocab_size = request.returns, self.limits.vocab_size
        of_prompt = returns.prompt_logprobs is not None or returns.hidden_states != "none"
        verify_sampling_params(params, vocab_size=vocab_size, least_tokens=0 if of_prompt else 1)
        verify_returns(returns, params, vocab_size=vocab_size, hidden_states=self.limits.hidden_states)
        verify_logits_processors(request.logits_processors, self._logits_processors)
        if request.sampling.seed is None:
            params = replace(params, seed=default_seed)
        if isinstance(request.prompt, TokensPrompt | EmbedsPrompt):
            return self._tokenized(request.prompt, returns, params)
        ids, media, notes = self._ids(request, request.prompt)
        self._check_prompt_length(len(ids), at_least=bool(media))
        if isinstance(request.prompt, ChatPrompt):
            use = request.prompt.tool_use if "tools" in self.template.variables else None
            grammar = chat_grammar(params.grammar, use, thinking=notes.thinking)
            params = replace(params, grammar=grammar)
        notes = replace(notes, warnings=(*request.warnings, *notes.warnings))
        return TokenizedPrompt(ids=ids, media=media, params=params, notes=notes)

    def _check_replica(self, replica: int | None) -> None:
        if replica is not None and not 0 <= replica < self.limits.replicas:
            raise BadRequestError(
                f"data_parallel_rank is {replica}; it must be 0 or more and below the number of replicas, which is "
                f"{self.limits.replicas} (setting --dp-size)",
                param="data_parallel_rank",
                code="invalid_value",
            )

    def tokenize_alone(self, request: GenerateReqInput) -> TokenizedPrompt:
        """As `tokenize`, of a text or a conversation that shall not be answered, so it may be longer than the context.
        Raises BadRequestError (messages)."""
        assert isinstance(request.prompt, ChatPrompt | TextPrompt)
        ids, media, _ = self._ids(request, request.prompt)
        return TokenizedPrompt(ids=ids, media=media, params=SamplingParams())

    def expand(self, prompt: TokenizedPrompt, media: Sequence[ProcessedMedium]) -> ExpandedPrompt:
        """Put processed media, in the order of `prompt.media`, at their placeholders. Takes milliseconds."""
        try:
            return self._expander.process(prompt.ids, media)
        except BadRequestError as error:
            error.param = error.param or "messages"
            raise

    def build(
        self, request: GenerateReqInput, prompt: TokenizedPrompt, expanded: ExpandedPrompt
    ) -> list[TokenizedGenerateReqInput]:
        """One message per choice, with rids REQUEST_ID-0, -1 ... Raises BadRequestError (context_length_exceeded)."""
        if request.continuations:
            return self._build_continuations(request, prompt, expanded)
        length = len(expanded.input_ids)
        self._check_prompt_length(length)
        verify_start(request.returns, length)
        embeds = request.prompt.embeds if isinstance(request.prompt, EmbedsPrompt) else None
        new_tokens = self._new_tokens(length, prompt.params.max_new_tokens)
        check_min_tokens(prompt.params.min_tokens, new_tokens)
        params = replace(prompt.params, max_new_tokens=new_tokens)
        return [
            TokenizedGenerateReqInput(
                rid=f"{request.request_id}-{index}",
                input_ids=expanded.input_ids,
                sampling_params=replace(params, seed=choice_seed(params.seed, index)),
                mm_inputs=expanded.mm_inputs,
                num_logprobs=request.num_logprobs,
                client=request.client,
                group=request.request_id,
                choice=index,
                # of one prompt they are the same for all choices, which share its cached prefix instead
                returns=replace(request.returns, prompt_logprobs=None, logprob_start_len=0)
                if index
                else request.returns,
                logits_processors=request.logits_processors,
                input_embeds=embeds,
                session_id="" if index else request.session_id,
                cache_salt=request.cache_namespace,
                priority=request.priority,
                data_parallel_rank=request.data_parallel_rank,
            )
            for index in range(request.n)
        ]

    def _build_continuations(
        self, request: GenerateReqInput, prompt: TokenizedPrompt, expanded: ExpandedPrompt
    ) -> list[TokenizedGenerateReqInput]:
        start = len(expanded.input_ids)
        made = []
        for index, text in enumerate(request.continuations):
            ids = self.tokenizer.encode(text)
            if not ids:
                raise BadRequestError(f"label {index} is an empty text", param="labels", code="invalid_value")
            self._check_prompt_length(start + len(ids))
            made.append(
                TokenizedGenerateReqInput(
                    rid=f"{request.request_id}-{index}",
                    input_ids=np.concatenate([expanded.input_ids, np.array(ids, dtype=np.int64)]),
                    sampling_params=replace(prompt.params, max_new_tokens=0),
                    mm_inputs=None if expanded.mm_inputs is None else followed_by_text(expanded.mm_inputs, len(ids)),
                    client=request.client,
                    cache_salt=request.cache_namespace,
                    priority=request.priority,
                    data_parallel_rank=request.data_parallel_rank,
                    group=request.request_id,
                    choice=index,
                    returns=replace(
                        request.returns,
                        prompt_logprobs=request.returns.prompt_logprobs or 0,
                        logprob_start_len=start,
                        hidden_states="none",
                    ),
                )
            )
        return made

    def _ids(
        self, request: GenerateReqInput, prompt: ChatPrompt | TextPrompt
    ) -> tuple[list[int], list[MediaRef], PromptNotes]:
        text, media, notes = self._render(prompt)
        given = request.mm_processor_kwargs
        knobs = self._expander.parse_kwargs(given) if given else None
        media = settle_media(media, knobs, self.limits.counts)
        # A token has at most so many bytes (and normalisation composes at most 4 characters to one), so an endless
        # text is refused before it is tokenised.
        self._check_prompt_length(len(text) // (4 * self.tokenizer.longest_token_bytes()), at_least=True)
        return self.tokenizer.encode(text), media, notes

    def _tokenized(
        self, prompt: TokensPrompt | EmbedsPrompt, returns: ReturnOptions, params: SamplingParams
    ) -> TokenizedPrompt:
        """Of a prompt that needs no tokenizer."""
        if isinstance(prompt, EmbedsPrompt):
            if returns.prompt_logprobs is not None:
                raise refusal(
                    "prompt_logprobs", returns.prompt_logprobs, "left out with input_embeds: they have no ids"
                )
            check_input_embeds(prompt.embeds.rows, hidden_size=self.limits.hidden_size)
            ids = [0] * len(prompt.embeds.rows)
        else:
            ids = list(prompt.ids)
            for token in ids:
                check_token("prompt", token, self.limits.vocab_size)
            for text in self._placeholders:
                if self.tokenizer.id_of(text) in ids:
                    raise refusal("prompt", f"a list with {text}", "without media, which token ids cannot bring")
        self._check_prompt_length(len(ids))
        return TokenizedPrompt(ids=ids, media=[], params=params)

    def _render(self, prompt: ChatPrompt | TextPrompt) -> tuple[str, list[MediaRef], PromptNotes]:
        if isinstance(prompt, TextPrompt):
            return prompt.text, list(prompt.media), NO_NOTES
        use = prompt.tool_use
        warnings = check_tool_use(self.template, use)
        kwargs, without_effect = template_kwargs(self.template, prompt.template_kwargs, prompt.reasoning_effort)
        messages = with_files(prompt.messages, prompt.find_file)
        converted = to_template_messages(messages, reserved=self._placeholders)
        text = self.template.render(
            converted.messages,
            tools=None if use is None else use.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            kwargs=kwargs,
        )
        return (
            text,
            converted.media,
            PromptNotes(thinking=opened_in_prompt(text), warnings=(*warnings, *without_effect)),
        )

    def _check_prompt_length(self, length: int, *, at_least: bool = False) -> None:
        limit = self.limits.max_model_len
        if length < 1 and not at_least:
            raise BadRequestError("the prompt is empty", param="messages")
        if length >= limit:
            raise BadRequestError(
                f"the prompt has {'at least ' if at_least else ''}{length} tokens; with one token of answer it must "
                f"fit the context of {limit} tokens (setting --max-model-len)",
                param="messages",
                code="context_length_exceeded",
            )

    def _new_tokens(self, length: int, wanted: int | None) -> int:
        left = self.limits.max_model_len - length
        if wanted is None:
            return left
        if wanted > left:
            raise BadRequestError(
                f"max_tokens is {wanted}, but after the prompt's {length} tokens the context of "
                f"{self.limits.max_model_len} tokens has room for {left} (setting --max-model-len)",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return wanted
