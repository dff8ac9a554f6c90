"""From `GenerateReqInput` to `TokenizedGenerateReqInput`: the path that the server and the offline LLM share.

It has two steps, so that a caller can load media between them: `tokenize` checks, renders and tokenises; `build` puts
the media into the prompt and makes one message for each choice. Both are synchronous, and neither keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from processors.families.base import ExpandedPrompt, ProcessedMedium
from processors.inputs import MultimodalInputs
from vlmserve.executor.logits_processors import LogitsProcessors
from vlmserve.frontend.chat_messages import (
    MediaCounts,
    MediaRef,
    joined_texts,
    settle_media,
    to_template_messages,
    with_files,
)
from vlmserve.frontend.chat_template import NO_NOTES, ChatTemplate, PromptNotes, check_tool_use, template_kwargs
from vlmserve.frontend.dialogue import OPEN_END, open_ended
from vlmserve.frontend.kept_tokens import kept_places, known_tokens
from vlmserve.frontend.media import RequestMedia
from vlmserve.frontend.parsers.answer import opened_in_prompt
from vlmserve.frontend.requests import (
    ChatPrompt,
    EmbedsPrompt,
    GenerateReqInput,
    TextPrompt,
    TokensPrompt,
    check_input_embeds,
)
from vlmserve.frontend.sampling import (
    MAX_TOP_LOGPROBS,
    SamplingDefaults,
    check_min_tokens,
    check_range,
    check_token,
    choice_seed,
    refusal,
    verify_dimensions,
    verify_logits_processors,
    verify_returns,
    verify_sampling_params,
)
from vlmserve.frontend.structured_output import chat_grammar, verify_grammar
from vlmserve.frontend.tasks import Task
from vlmserve.ipc.messages import Carried, TokenizedGenerateReqInput
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedPrompt:
    """A checked request with its prompt's ids, before media are expanded into them.

    request: as it came, with complete sampling parameters. media: in the order of their placeholders in `ids`. notes:
    needed to read the answers.
    """

    request: GenerateReqInput
    ids: list[int]
    media: list[MediaRef]
    notes: PromptNotes = NO_NOTES


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """The limits that requests are checked against.

    max_model_len: context length in tokens, prompt and answer together. vocab_size: ids of the model. hidden_size:
    width of its embeddings. counts: most pictures and videos in a request. hidden_states: whether requests may ask for
    hidden states. replicas: how many there are to choose from. answers: whether there are any, or this server only
    computes prompts for others. task: what is asked of the model. reads_ids: whether the model needs the ids of all
    tokens, for tables of n-grams, so that prompts cannot be embeddings.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int = 0
    counts: MediaCounts = field(default_factory=MediaCounts)
    hidden_states: bool = False
    replicas: int = 1
    answers: bool = True
    task: Task = field(default_factory=Task)
    reads_ids: bool = False


# Characters that are rarely fewer tokens than one, and characters of a piece.
_CHARS_PER_TOKEN = 4
_PIECE_CHARS = 2**16
_MOST_COUNTED = 2**18  # tokens


class RequestBuilder:
    """Makes the scheduler's messages. Threads may share one builder."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        expander: RequestMedia,
        limits: RequestLimits,
        defaults: SamplingDefaults | None = None,
        logits_processors: LogitsProcessors | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.template = template
        self._expander = expander
        self._defaults = defaults or SamplingDefaults()
        self._logits_processors = logits_processors or LogitsProcessors({})
        named = ((pad, tokenizer.decode([pad], skip_special_tokens=False)) for pad in expander.pads)
        self._pads = {pad: text for pad, text in named if text}
        self.placeholders = tuple(self._pads.values())
        """Texts of the tokens that stand for media in a prompt. A client's text that contains one is refused: it would
        ask for a picture that is not there."""

    @property
    def defaults(self) -> dict[str, float | None]:
        """The values of fields that a request leaves out, as far as they do not depend on it."""
        return {**asdict(self._defaults), **self._expander.defaults}

    def tokenize(self, request: GenerateReqInput, *, default_seed: int = 0) -> TokenizedPrompt:
        """Check, render and tokenise a request. Raises BadRequestError (parameters, messages, context_length_exceeded).

        default_seed: used where the request brings no seed.
        """
        if not self.limits.answers:
            raise BadRequestError(
                "this server computes prompts for other servers, and gives no answers (setting --role prefill): ask a "
                "server with --role decode"
            )
        self.limits.task.check(request.task)
        params, returns, vocab_size = request.sampling_params, request.returns, self.limits.vocab_size
        params = self._defaults.apply(params, seed=default_seed)
        self._check_replica(request.data_parallel_rank)
        check_range("top_logprobs", request.num_logprobs, 0, MAX_TOP_LOGPROBS)
        of_prompt = returns.prompt_logprobs is not None or returns.hidden_states != "none" or bool(returns.pooling)
        of_prompt = of_prompt or (isinstance(request.prompt, ChatPrompt) and request.prompt.open_ended)
        verify_sampling_params(params, vocab_size=vocab_size, least_tokens=0 if of_prompt else 1)
        verify_returns(returns, params, vocab_size=vocab_size, hidden_states=self.limits.hidden_states)
        if returns.pooling is not None:
            verify_dimensions(returns.pooling.dimensions, self.limits.hidden_size, self.limits.task.dimensions)
        verify_logits_processors(request.logits_processors, self._logits_processors)
        ignored = () if params.grammar is None else verify_grammar(params.grammar)
        keep = request.truncate_prompt_tokens
        if keep is not None and (keep < -1 or keep == 0 or isinstance(request.prompt, EmbedsPrompt)):
            raise refusal("truncate_prompt_tokens", keep, "-1, or 1 or more; and left out with input_embeds")
        warnings = (*request.warnings, *ignored)
        tokenized = self._tokenized(replace(request, sampling_params=params, warnings=warnings))
        if keep is None:
            self._room_behind(len(tokenized.ids), at_least=bool(tokenized.media))
        return tokenized

    def tokenize_alone(self, request: GenerateReqInput) -> TokenizedPrompt:
        """Tokenise a text or a conversation that will not be answered, so it may be longer than the context, up to
        262,144 tokens. Raises BadRequestError (messages)."""
        assert isinstance(request.prompt, ChatPrompt | TextPrompt)
        return self._rendered(request, request.prompt, whole=False)

    def expand(self, prompt: TokenizedPrompt, media: Sequence[ProcessedMedium]) -> ExpandedPrompt:
        """Put processed media, in the order of `prompt.media`, at their placeholders. Takes milliseconds."""
        try:
            return self._expander.process(prompt.ids, media)
        except BadRequestError as error:
            error.param = error.param or "messages"
            raise

    def build(self, prompt: TokenizedPrompt, media: Sequence[ProcessedMedium]) -> list[TokenizedGenerateReqInput]:
        """Make one message for each choice, with rids GROUP-0, GROUP-1 ... Raises BadRequestError
        (context_length_exceeded)."""
        request, expanded = prompt.request, self._truncated(prompt, self.expand(prompt, media))
        params, length = request.sampling_params, len(expanded.input_ids)
        room = self._room_behind(length)
        wanted = room if params.max_new_tokens is None else params.max_new_tokens
        if wanted > room:
            raise BadRequestError(
                f"max_tokens is {wanted}, but after the prompt's {length} tokens the context of "
                f"{self.limits.max_model_len} tokens has room for {room} (setting --max-model-len)",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if request.returns.logprob_start_len >= length:
            raise refusal(
                "logprob_start_len", request.returns.logprob_start_len, f"below {length}, the prompt's tokens"
            )
        check_min_tokens(params.min_tokens, wanted)
        group = request.group or request.request_id
        options = request.options() | {
            "group": group,
            "sampling_params": replace(params, max_new_tokens=wanted, seed=choice_seed(params.seed or 0, 0)),
            "cache_salt": request.cache_namespace,
        }
        first = TokenizedGenerateReqInput(
            **options,
            rid=f"{group}-0",
            input_ids=expanded.input_ids,
            mm_inputs=expanded.mm_inputs,
            input_embeds=request.prompt.embeds if isinstance(request.prompt, EmbedsPrompt) else None,
            carried=self._carried(request, expanded),
        )
        if request.continuations:
            return [self._continuation(first, index, text) for index, text in enumerate(request.continuations)]
        seeds = (choice_seed(params.seed or 0, index) for index in range(1, request.n))
        return [first, *(self._choice(first, index, seed) for index, seed in enumerate(seeds, 1))]

    def _carried(self, request: GenerateReqInput, expanded: ExpandedPrompt) -> Carried | None:
        """Return where the KV of a conversation's tokens is, if a part of it has left."""
        if request.slid is None:
            return None
        assert isinstance(request.prompt, ChatPrompt)
        places, after = np.arange(len(expanded.input_ids)), known_tokens(expanded)
        for messages in reversed(request.slid.forms):
            text, refs, _ = self._render(replace(request.prompt, messages=messages))
            ids = self.tokenizer.encode(text, add_special_tokens=request.prompt.add_special_tokens)
            before = known_tokens(self._expander.process(ids, [ref.source for ref in refs]))
            kept = kept_places(before, after)
            places, after = kept[places[places < len(kept)]], before
        salt = replace(request, cache_salt=request.slid.cache_salt).cache_namespace
        return Carried(places=places, cache_salt=salt)

    def _truncated(self, prompt: TokenizedPrompt, expanded: ExpandedPrompt) -> ExpandedPrompt:
        """Return the end of a prompt, as its request asks. Raises BadRequestError if a picture or video would be
        cut."""
        keep, length = prompt.request.truncate_prompt_tokens, len(expanded.input_ids)
        if keep == -1:
            keep = max(1, self.limits.max_model_len - (prompt.request.sampling_params.max_new_tokens or 1))
        if keep is None or keep >= length:
            return expanded
        if prompt.request.truncation_side == "right":
            return self._cut_at_end(prompt.request, expanded, keep)
        cut, media = length - keep, expanded.mm_inputs
        if media is None:
            return ExpandedPrompt(expanded.input_ids[cut:], None)
        before = (
            next(at for at, token in enumerate(prompt.ids) if token in self._pads) - 1
        )  # its opening tag stays, too
        if cut > before:
            raise refusal(
                "truncate_prompt_tokens",
                prompt.request.truncate_prompt_tokens,
                f"at least {length - before}: the prompt has {length} tokens, and its first picture or video begins "
                f"behind {before}",
            )
        items = (replace(item, offsets=tuple((a - cut, b - cut) for a, b in item.offsets)) for item in media.items)
        positions = media.mrope_positions[:, cut:] - cut
        return ExpandedPrompt(expanded.input_ids[cut:], replace(media, items=tuple(items), mrope_positions=positions))

    @staticmethod
    def _cut_at_end(request: GenerateReqInput, expanded: ExpandedPrompt, keep: int) -> ExpandedPrompt:
        media = expanded.mm_inputs
        if media is None:
            return ExpandedPrompt(expanded.input_ids[:keep], None)
        end = 1 + max(last for item in media.items for _, last in item.offsets)  # with its closing tag
        if keep < end:
            raise refusal(
                "truncate_prompt_tokens",
                request.truncate_prompt_tokens,
                f"at least {end}, behind which the prompt's last picture or video ends",
            )
        positions = media.mrope_positions[:, :keep]
        delta = int(positions.max()) + 1 - keep
        return ExpandedPrompt(
            expanded.input_ids[:keep], replace(media, mrope_positions=positions, mrope_position_delta=delta)
        )

    @staticmethod
    def _choice(first: TokenizedGenerateReqInput, index: int, seed: int) -> TokenizedGenerateReqInput:
        """Make a later choice of the first one's request. Logprobs of the prompt are the same for all choices, and the
        later ones share its cached prefix, so only the first one has them computed."""
        return replace(
            first,
            rid=f"{first.group}-{index}",
            choice=index,
            sampling_params=replace(first.sampling_params, seed=seed),
            returns=replace(first.returns, prompt_logprobs=None, logprob_start_len=0),
            session_id="",
        )

    def _continuation(self, first: TokenizedGenerateReqInput, index: int, text: str) -> TokenizedGenerateReqInput:
        """Make the message that scores one text behind the prompt of `first`."""
        ids, start = self.tokenizer.encode(text), len(first.input_ids)
        if not ids:
            raise BadRequestError(f"label {index} is an empty text", param="labels", code="invalid_value")
        self._room_behind(start + len(ids))
        top = first.returns.prompt_logprobs or 0
        return replace(
            first,
            rid=f"{first.group}-{index}",
            choice=index,
            input_ids=np.concatenate([first.input_ids, np.array(ids, dtype=np.int64)]),
            mm_inputs=None if first.mm_inputs is None else _followed_by_text(first.mm_inputs, len(ids)),
            sampling_params=replace(first.sampling_params, max_new_tokens=0),
            returns=replace(first.returns, prompt_logprobs=top, logprob_start_len=start, hidden_states="none"),
            num_logprobs=None,
            logits_processors=(),
            session_id="",
        )

    def _tokenized(self, request: GenerateReqInput) -> TokenizedPrompt:
        match request.prompt:
            case EmbedsPrompt():
                if (count := request.returns.prompt_logprobs) is not None:
                    raise refusal("prompt_logprobs", count, "left out with input_embeds: they have no ids")
                if self.limits.reads_ids:
                    raise BadRequestError(
                        "input_embeds cannot be the prompt of this model: it looks up n-grams of token ids",
                        param="input_embeds",
                        code="invalid_value",
                    )
                rows = request.prompt.embeds.rows
                check_input_embeds(rows, hidden_size=self.limits.hidden_size)
                return TokenizedPrompt(request=request, ids=[0] * len(rows), media=[])
            case TokensPrompt():
                return TokenizedPrompt(request=request, ids=self._checked_ids(request.prompt.ids), media=[])
        prompt = self._rendered(request, request.prompt, whole=request.truncate_prompt_tokens is None)
        if isinstance(request.prompt, ChatPrompt):
            use = request.prompt.tool_use if "tools" in self.template.variables else None
            grammar = chat_grammar(request.sampling_params.grammar, use, thinking=prompt.notes.thinking)
            params = replace(request.sampling_params, grammar=grammar)
            prompt = replace(prompt, request=replace(request, sampling_params=params))
        return prompt

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        for token in ids:
            check_token("prompt", token, self.limits.vocab_size)
        for pad, text in self._pads.items():
            if pad in ids:
                raise refusal("prompt", f"a list with {text}", "without media, which token ids cannot bring")
        return list(ids)

    def _rendered(self, request: GenerateReqInput, prompt: ChatPrompt | TextPrompt, *, whole: bool) -> TokenizedPrompt:
        """Render and tokenise a prompt. whole: all of it has to fit the context."""
        if isinstance(prompt, TextPrompt):
            text, media, notes = prompt.text, list(prompt.media), NO_NOTES
            self._expander.check(media)
        else:
            text, media, notes = self._render(prompt)
        given = request.mm_processor_kwargs
        media = settle_media(media, self._expander.parse_kwargs(given) if given else None, self.limits.counts)
        notes = replace(notes, warnings=(*request.warnings, *notes.warnings))
        ids = self._encoded(text, whole, add_special_tokens=prompt.add_special_tokens)
        return TokenizedPrompt(request=request, ids=ids, media=media, notes=notes)

    def _encoded(self, text: str, whole: bool, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text. One of far too many tokens is refused before all of it is tokenised, which would take
        minutes and gigabytes."""
        most = self.limits.max_model_len if whole else max(_MOST_COUNTED, self.limits.max_model_len)
        if len(text) > _CHARS_PER_TOKEN * most:
            count = 0
            for start in range(0, len(text), _PIECE_CHARS):
                count += len(self.tokenizer.encode(text[start : start + _PIECE_CHARS]))
                if count > 5 * most // 4:  # a cut may split tokens, but not so many
                    self._room_behind(count, at_least=True)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _render(self, prompt: ChatPrompt) -> tuple[str, list[MediaRef], PromptNotes]:
        use = prompt.tool_use
        warnings = check_tool_use(self.template, use)
        kwargs, without_effect = template_kwargs(self.template, prompt.template_kwargs, prompt.reasoning_effort)
        given = open_ended(prompt.messages) if prompt.open_ended else prompt.messages
        messages, media = to_template_messages(with_files(given, prompt.find_file), reserved=self.placeholders)
        self._expander.check(media)
        if not self._expander.sees:
            messages = joined_texts(messages)
        text = self.template.render(
            messages,
            tools=None if use is None else use.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            kwargs=kwargs,
        )
        if prompt.open_ended:
            text = text[: max(0, text.rfind(OPEN_END))]
        return text, media, PromptNotes(thinking=opened_in_prompt(text), warnings=(*warnings, *without_effect))

    def _check_replica(self, replica: int | None) -> None:
        if replica is not None and not 0 <= replica < self.limits.replicas:
            raise BadRequestError(
                f"data_parallel_rank is {replica}; it must be 0 or more and below the number of replicas, which is "
                f"{self.limits.replicas} (setting --dp-size)",
                param="data_parallel_rank",
                code="invalid_value",
            )

    def _room_behind(self, length: int, *, at_least: bool = False) -> int:
        """Return how many tokens an answer may have behind a prompt of `length` tokens. This is the only check of a
        prompt's length: BadRequestError for an empty prompt, and for one that leaves no room.

        at_least: more tokens are still to come, such as those of media.
        """
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
        return limit - length


def _followed_by_text(media: MultimodalInputs, length: int) -> MultimodalInputs:
    """Return the media of a prompt that is longer by `length` tokens of text."""
    end = media.mrope_positions.shape[1] + media.mrope_position_delta
    text = np.broadcast_to(np.arange(end, end + length), (3, length))
    return replace(media, mrope_positions=np.concatenate([media.mrope_positions, text], axis=1))
