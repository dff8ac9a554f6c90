"""Messages between the API process (TokenizerManager), the Scheduler and the DetokenizerManager.

Messages are frozen dataclasses; `vlmserve_common.transport.wire` encodes them (msgspec, numpy arrays out of band).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from vision.cache.stats import PoolStats
from vlmserve_common.checkpoint.adapter_ref import AdapterRef

THINK_END = "</think>"
"""The text that ends a model's thoughts. A grammar holds from there on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarSpec:
    """The form that an answer must have. text: a JSON schema, a regular expression that the whole answer matches, a
    grammar in EBNF, a JSON list of texts to choose from, or a structural tag in JSON.

    calls: a structural tag in JSON; the answer may be these calls of functions instead.
    thinking: the prompt has begun the model's thoughts; the form holds behind their end.
    strict: objects of a JSON schema have the properties that it names and no others; a structural tag is followed to
    the letter or refused. param: the request's field that the grammar comes from, for errors.
    """

    kind: Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]
    text: str
    calls: str = ""
    thinking: bool = False
    strict: bool = True
    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How answers are sampled: first as a request asks, then checked and with the server's defaults filled in.

    temperature, top_p, top_k, min_p, repetition_penalty, seed: None where the request says nothing; the tokenizer
    fills them in (`SamplingDefaults.apply`). For all other fields None is the same as leaving them out.
    max_new_tokens: None means up to the context length. max_tokens: another name for it, None once the object is made;
    ValueError if both are given and differ. temperature 0 is greedy. top_k -1 (or 0) is off.
    seed: sampling noise is a function of (seed, output index) only. logit_bias: token id -> added to the logit.
    repetition_penalty: logits of all tokens of prompt and answer so far are divided by it (negative ones multiplied).
    stop: strings that end the answer and are not part of it (found by the detokenizer).
    stop_token_ids: ids that end the answer, besides the model's own (unless ignore_eos).
    include_stop_str_in_output: the text of the stop string or token that ended the answer is part of it.
    allowed_token_ids: no other tokens are sampled, unless the grammar allows none of them; None: all.
    grammar: the form that the answer must have; it goes before all other fields and ends where the grammar does.
    min_tokens: before the answer has this many tokens, no id that would end it is sampled and no stop string is found.
    """

    max_new_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    allowed_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) is None:
                default = {} if one.name == "logit_bias" else one.default
                object.__setattr__(self, one.name, default)
        if self.max_tokens is None:
            return
        if self.max_new_tokens not in (None, self.max_tokens):
            raise ValueError(f"max_tokens is {self.max_tokens}, and max_new_tokens {self.max_new_tokens}: give one")
        object.__setattr__(self, "max_new_tokens", self.max_tokens)
        object.__setattr__(self, "max_tokens", None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """A vector to be made of the final hidden states of a prompt: that of its last token, or the mean of all.

    dimensions: how many numbers are kept, the first ones; None: all. normalize: these are divided by their length.
    """

    how: Literal["last", "mean"] = "last"
    dimensions: int | None = None
    normalize: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnOptions:
    """What a request returns besides its answer. `verify_returns` checks its values.

    prompt_logprobs: how many alternatives to return at each prompt position, besides the prompt's own token; None: no
    logprobs of the prompt. logprob_start_len: the first position they are returned for. token_ids_logprob: tokens whose
    logprobs are returned at each of these positions, and at those of the answer. Logprobs come from the model's own
    distribution; with temp_scaled_logprobs at the request's temperature, and with top_p_normalized_logprobs over the
    tokens that its top_p leaves. hidden_states: "last" returns the final hidden state of the prompt's
    last token; "all" returns the one that each token of the answer is made of, of which the first is the same.
    pooling: returns a vector in the place of hidden states.
    """

    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    temp_scaled_logprobs: bool = False
    top_p_normalized_logprobs: bool = False
    hidden_states: Literal["none", "last", "all"] = "none"
    pooling: Pooling | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsProcessorCall:
    """The name of a logits processor of the operator's (--logits-processors), and the request's parameters for it."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEmbeds:
    """A prompt that is given as embeddings: rows float32 [L, hidden], digests uint8 [L, 32], one of each row."""

    rows: np.ndarray
    digests: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Fields that a request keeps all the way: from the API, in `GenerateReqInput`, to the scheduler.

    num_logprobs: None for no logprobs, else how many alternatives to return besides the chosen token's. client: its id;
    clients take turns. group: the engine's id of the request, which all answers to its prompt share.
    session_id: of the conversation whose KV is kept for its next turn; "" is none. priority: lower goes first, where
    the policy says so. unattended: nobody reads the answer before it is whole. cache_salt: only requests with the same
    one share cached prefixes. logits_processors: applied in this order. data_parallel_rank: the replica that is to
    answer; None: any. adapter: the LoRA adapter that answers; it is part of the salt of its prefixes.
    """

    sampling_params: SamplingParams = SamplingParams()
    returns: ReturnOptions = ReturnOptions()
    num_logprobs: int | None = None
    logits_processors: tuple[LogitsProcessorCall, ...] = ()
    client: str = ""
    group: str = ""
    session_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    unattended: bool = False
    data_parallel_rank: int | None = None
    adapter: AdapterRef | None = None

    def options(self) -> dict[str, Any]:
        """Return these fields by their names, for the next form of the same request."""
        return {one.name: getattr(self, one.name) for one in fields(RequestOptions)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Says which KV of a session's last prompt stands for that of the first tokens of the next, though a part before
    them has left. places: int64 [n], theirs in the last prompt, ascending. cache_salt: of the last prompt."""

    places: np.ndarray
    cache_salt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedGenerateReqInput(RequestOptions):
    """One answer to make. rid: the engine's unique id of this answer.

    input_ids: int64 [L], real ids (image pad tokens included), already expanded. The ids mean nothing if there are
    `input_embeds`. choice: the number of this answer among those of its group.
    sampling_params.max_new_tokens may be 0: then nothing is sampled, and all that is returned is of the prompt.
    carried: KV that is there under another prompt.
    """

    rid: str
    input_ids: np.ndarray
    mm_inputs: MultimodalInputs | None = None
    input_embeds: InputEmbeds | None = None
    choice: int = 0
    carried: Carried | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTokenizedGenerateReqInput:
    """Several answers in one message. Arrays that they share, such as the pictures of one prompt, travel once."""

    requests: tuple[TokenizedGenerateReqInput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReqInput:
    """Media to encode ahead of time, for later prompts. The items are in no prompt yet, so they have no offsets.

    pin: the embeddings are never evicted from the disk. adapter: whose embeddings they are.
    """

    rid: str
    items: tuple[MultimodalDataItem, ...]
    pin: bool = False
    adapter: AdapterRef | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortReq:
    """The order to stop working on `rid`. The scheduler ignores an unknown rid.

    finished: the detokenizer found a stop string. The client has its whole answer, so the scheduler frees the request
    and reports nothing. Without it (a client went away) the scheduler reports an "abort" finish.
    """

    rid: str
    finished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishReason:
    """type: "stop" (matched = the stop token id or stop string), "length", "abort" or "error" (message, status, and the
    field of the request that is at fault). shown: the answer's text has the text of the stop token."""

    type: str
    matched: int | str | None = None
    message: str = ""
    status: int = 500
    param: str | None = None
    shown: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Logprobs of one output token, of the distribution before penalties and bias (see `ReturnOptions`).

    top_ids / top_logprobs: the most likely tokens, best first. token_ids_logprobs: of those that were asked for.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    token_ids_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobs:
    """Logprobs of the tokens at positions start .. L-1 of a prompt, each after all tokens before it: n rows.

    The token at position 0 comes after none: its row is NaN (start is 0 then). token_ids: int64 [n], the prompt's own
    (media pad ids like any other). logprobs: float32 [n]; ranks: int64 [n], 1 for the likeliest. top_ids, top_logprobs:
    [n, K], best first. token_ids_logprobs: float32 [n, T].
    """

    start: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    token_ids_logprobs: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """A request's times at the scheduler, in seconds. A stage is None if the request skipped it or has not reached it.

    encode_s: from arrival until all embeddings were there; encode_cached: none of them was computed for this request.
    queue_s: from then until the first chunk of the prompt. prefill_s: from there to the first token. decode_s: from
    there to the last token. total_s: from arrival. retractions: how often the KV slots were taken back; that time
    counts for the stage that the request was in.
    """

    queue_s: float
    encode_s: float | None
    encode_cached: bool | None
    prefill_s: float | None
    decode_s: float | None
    total_s: float
    retractions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Guesses:
    """Guessed tokens that were checked. steps: how often tokens of an answer were guessed; tokens: how many in all.
    right_at: how many first, second and further guesses of these steps were right."""

    steps: int = 0
    tokens: int = 0
    right_at: tuple[int, ...] = ()

    @property
    def right(self) -> int:
        """Return how many guesses were right."""
        return sum(self.right_at)

    @property
    def accept_length(self) -> float:
        """Return the mean number of tokens of a step with guesses: the right ones and one more; 0 without steps."""
        return 1 + self.right / self.steps if self.steps else 0.0

    def plus(self, other: Guesses, times: int = 1) -> Guesses:
        """Add other figures so many times; -1 takes them away."""
        places = zip_longest(self.right_at, other.right_at, fillvalue=0)
        return Guesses(
            steps=self.steps + times * other.steps,
            tokens=self.tokens + times * other.tokens,
            right_at=tuple(one + times * more for one, more in places),
        )

    def without(self, places: range) -> Guesses:
        """Count one guess less as right at each of these places."""
        return replace(self, right_at=tuple(count - (at in places) for at, count in enumerate(self.right_at)))

    def __str__(self) -> str:
        places = ", ".join(map(str, self.right_at)) or "none"
        right = f"{self.right} of {self.tokens} guesses right ({places} by position)"
        return f"{right}, accepted length {self.accept_length:.2f}"


class TokenOutput(NamedTuple):
    """The result of one step for one answer: tokens from the scheduler, to which the detokenizer adds their text.

    It is a tuple because every step makes hundreds of them, and a frozen dataclass takes three times as long to make.
    token_ids: the new output tokens (a stop token that ended the answer is included). logprobs: one per new token,
    or None. finish_reason None means that more will come. prompt_tokens/completion_tokens/cached_tokens: totals.
    stop, skip_special_tokens, min_tokens, include_stop: repeated from the sampling parameters in an answer's first
    output only; prompt_logprobs come with that output, too. hidden_states: float32 [n, hidden], of the prompt's last
    token or of the new tokens, or [1, dimensions], see `Pooling`. stages: in an answer's first and last output.
    guesses: so far, if there were any; those behind a stop string do not count as right.

    text: the new text, whole UTF-8 characters, never part of a stop string unless include_stop. Text may be held back
    (it may be part of a stop string or an incomplete character): then it comes with a later output than its tokens.
    Once a stop string matched, tokens after the one that completed it are dropped and completion_tokens does not count
    them.
    """

    rid: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    first: bool = False
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states: np.ndarray | None = None
    stages: StageTimes | None = None
    min_tokens: int = 0
    include_stop: bool = False
    guesses: Guesses | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTokenOutput:
    """All outputs of one step: scheduler -> DetokenizerManager."""

    outputs: tuple[TokenOutput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTextOutput:
    """All new text of one step: DetokenizerManager -> TokenizerManager."""

    outputs: tuple[TokenOutput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedItem:
    """The outcome for one medium that was to be encoded ahead of time.

    temporal_patches: one for a picture; encoded: how many of them were computed. patches_encoded: the same in vision
    patches. saved: whether all of them are on disk and survive a crash; None where nothing is kept on disk.
    """

    modality: Modality
    temporal_patches: int
    encoded: int = 0
    patches_encoded: int = 0
    saved: bool | None = None

    @property
    def found(self) -> int:
        """Return the number of temporal patches that were cached."""
        return self.temporal_patches - self.encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOutput:
    """The answer to an `EncodeReqInput`, one entry for each item. error: why there is none (message, status)."""

    rid: str
    items: tuple[EncodedItem, ...]
    error: FinishReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramStats:
    """A histogram: counts[i] values were at most bounds[i] and above bounds[i - 1]. The last count is the values
    above all bounds."""

    bounds: tuple[int, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """Figures that `scheduler.meter` counts. encoding_reqs: requests that wait for embeddings now. The rest are totals
    since the start:

    preempted_total: how often a request, running or in its prompt, lost its KV slots. prompt_tokens_computed_total:
    prompt tokens computed, also when computed again. prefix_queries_total, prefix_hits_total: tokens of computed
    prompts, and how many of them the prefix cache had. encode_seconds_total, prefill_seconds_total,
    decode_seconds_total: what the device's thread spent on slices of encoding, on prompts, and on requests that decode.
    decode_steps_total, decode_reqs_total: steps with requests that decode, and how many these were. step_reqs,
    step_tokens: requests and tokens of each step of the model.
    """

    encoding_reqs: int = 0
    preempted_total: int = 0
    prompt_tokens_computed_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    guesses: Guesses = Guesses()
    encode_seconds_total: float = 0.0
    prefill_seconds_total: float = 0.0
    decode_seconds_total: float = 0.0
    decode_steps_total: int = 0
    decode_reqs_total: int = 0
    step_reqs: HistogramStats = HistogramStats()
    step_tokens: HistogramStats = HistogramStats()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStats:
    """Figures of `--enable-eplb`. imbalance: the load of the busiest rank before the last placement of experts, as a
    multiple of the mean; imbalance_after: the same after that placement. Both are 0 before the first
    placement. rebalances_total, moved_total: placements, and experts that got another slot, since the start."""

    imbalance: float = 0.0
    imbalance_after: float = 0.0
    rebalances_total: int = 0
    moved_total: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoverStats:
    """Prompts of one server that another one computes. Here, for others: inflight, whose KV they may still read.
    Elsewhere, for this server: transferring, whose KV is on its way; prompts_total and tokens_total, whose KV has come;
    failed_total, whose KV has not, so that they were computed here."""

    inflight: int = 0
    transferring: int = 0
    prompts_total: int = 0
    tokens_total: int = 0
    failed_total: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Plain figures of one scheduler, for /metrics and tests. Token counts are KV slots. replicas: the figures of
    each scheduler, if these are sums."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_total_tokens: int = 0
    kv_free_tokens: int = 0
    kv_cached_tokens: int = 0
    kv_locked_tokens: int = 0
    req_pool_total: int = 0
    req_pool_free: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    encoder: PoolStats
    finished_total: int = 0
    aborted_total: int = 0
    retracted_total: int = 0
    forward_steps_total: int = 0
    num_warmups: int = 0
    steps: StepStats = StepStats()
    handover: HandoverStats = HandoverStats()
    experts: ExpertStats = ExpertStats()
    replicas: tuple[SchedulerStats, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestsLost:
    """A message about these requests could not be read, so none of them can be answered. message: for their clients.

    The receiver gets this in the lost message's place and passes it on to the API process, which ends the requests.
    """

    rids: tuple[str, ...]
    message: str


SchedulerInput: TypeAlias = TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | EncodeReqInput | AbortReq
SchedulerOutput: TypeAlias = BatchTokenOutput | EncodeOutput
DetokenizerInput: TypeAlias = SchedulerOutput | RequestsLost
TokenizerManagerInput: TypeAlias = BatchTextOutput | EncodeOutput | RequestsLost


class PreparedMessage(Protocol):
    """A message whose arrays are copied out. The event loop calls one of the two methods, once."""

    def send(self) -> None:
        """Hand the message to the scheduler."""

    def discard(self) -> None:
        """Free what the message holds: it will not be sent."""


def rids_of(message: object) -> tuple[str, ...]:
    """Return the rids that a message is about, found by its fields; none for a message about the engine."""
    if isinstance(message, RequestsLost):
        return message.rids
    parts = getattr(message, "requests", None) or getattr(message, "outputs", None) or (message,)
    return tuple(part.rid for part in parts if hasattr(part, "rid"))
