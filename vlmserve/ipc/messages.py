"""Messages between the API process (TokenizerManager), the Scheduler and the DetokenizerManager.

Messages are frozen dataclasses; `vlmserve_common.transport.wire` encodes them (msgspec, numpy arrays out of band).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from vision.cache.stats import PoolStats

THINK_END = "</think>"
"""The text that ends a model's thoughts; a grammar holds from there on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarSpec:
    """What an answer must look like. text: a JSON schema, a regular expression that the whole answer matches, a grammar
    in EBNF, a JSON list of texts to choose from, or a structural tag in JSON.

    calls: the answer may be calls of functions in place of that: a structural tag in JSON.
    thinking: the prompt has begun the model's thoughts; their rest comes before all that.
    strict: objects of a JSON schema have the properties that it names, and no others; a structural tag is followed to
    the letter or refused. param: the request's field that it comes from, for errors.
    """

    kind: Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]
    text: str
    calls: str = ""
    thinking: bool = False
    strict: bool = True
    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one answer is sampled. Values are validated by whoever makes one (see `verify`).

    max_new_tokens: None means up to the context length. temperature 0 is greedy. top_k -1 (or 0) is off.
    seed: sampling noise is a function of (seed, output index) only. logit_bias: token id -> added to the logit.
    repetition_penalty: logits of all tokens of prompt and answer so far are divided by it (negative ones multiplied).
    stop: strings that end the answer and are not part of it (found by the detokenizer).
    stop_token_ids: ids that end the answer, besides the model's own (unless ignore_eos).
    grammar: what the answer must look like; it goes before all other fields, and ends where the grammar does.
    min_tokens: until the answer has so many, ids that would end it are not sampled, and stop strings not looked for.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    min_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnOptions:
    """What a request returns besides its answer. Values are validated by whoever makes one (see `verify_returns`).

    prompt_logprobs: how many alternatives to return at each prompt position, besides the prompt's own token; None: no
    logprobs of the prompt. logprob_start_len: the first position they are returned for. token_ids_logprob: tokens whose
    logprobs are returned at each of these positions, and at those of the answer. All logprobs are of the model's own
    distribution; temp_scaled_logprobs: at the request's temperature instead; top_p_normalized_logprobs: of the
    likeliest tokens only that its top_p leaves. hidden_states: final ones of the prompt's last token ("last"), or those
    that each token of the answer is made of ("all"), of which the first is the same.
    """

    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    temp_scaled_logprobs: bool = False
    top_p_normalized_logprobs: bool = False
    hidden_states: Literal["none", "last", "all"] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsProcessorCall:
    """A logits processor of the operator's (--logits-processors), by its name, and what the request tells it: JSON."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputEmbeds:
    """What a prompt is made of in place of tokens: float32 [L, hidden]. digests: uint8 [L, 32], of each row."""

    rows: np.ndarray
    digests: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedGenerateReqInput:
    """One answer to make. input_ids: int64 [L], real ids (image pad tokens included), already expanded; any where
    `input_embeds` stand in their place.

    max_new_tokens may be 0: nothing is sampled, and all that there is to return is of the prompt.

    num_logprobs: None for no logprobs, else how many alternatives to return besides the chosen token's. client: who
    asks; clients take turns. group: of all answers to one prompt, choice: which of them this is. session_id: of the
    conversation whose KV is kept for its next turn when this one has ended; "" is none. priority: lower goes first,
    where the policy says so. cache_salt: only requests with the same one share cached prefixes. logits_processors:
    applied in this order. data_parallel_rank: the replica that is to answer; None: whichever.
    """

    rid: str
    input_ids: np.ndarray
    sampling_params: SamplingParams
    mm_inputs: MultimodalInputs | None = None
    num_logprobs: int | None = None
    client: str = ""
    group: str = ""
    choice: int = 0
    session_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    returns: ReturnOptions = field(default_factory=ReturnOptions)
    logits_processors: tuple[LogitsProcessorCall, ...] = ()
    input_embeds: InputEmbeds | None = None
    data_parallel_rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTokenizedGenerateReqInput:
    """Several answers, sent together: arrays that they share, such as the pictures of one prompt, travel once."""

    requests: tuple[TokenizedGenerateReqInput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReqInput:
    """Media to encode ahead of time, for prompts to come; they stand in none, and have no offsets.

    pin: their embeddings are never evicted from the disk.
    """

    rid: str
    items: tuple[MultimodalDataItem, ...]
    pin: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortReq:
    """Stop working on `rid`; unknown rids are ignored.

    finished: sent by the detokenizer when it found a stop string: the client has its whole answer, so the scheduler
    frees the request without reporting anything. Otherwise (a client went away) it reports an "abort" finish.
    """

    rid: str
    finished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GetStatsReq:
    """Ask the scheduler for a `SchedulerStats`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishReason:
    """type: "stop" (matched = the stop token id or stop string), "length", "abort" or "error" (message, status, and the
    field of the request that is at fault)."""

    type: str
    matched: int | str | None = None
    message: str = ""
    status: int = 500
    param: str | None = None


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
    """Where a request's time went at the scheduler, in seconds; None for stages that it had no need of, or not come to.

    encode_s: from its arrival until all embeddings were there; encode_cached: none of them was computed for it.
    queue_s: from then until the first chunk of its prompt. prefill_s: from that to the first token. decode_s: from that
    to the last. total_s: from its arrival. retractions: how often its KV slots were taken back; that time is part of
    the stage it was at.
    """

    queue_s: float
    encode_s: float | None
    encode_cached: bool | None
    prefill_s: float | None
    decode_s: float | None
    total_s: float
    retractions: int = 0


class TokenOutput(NamedTuple):
    """What one scheduler step produced for one request. A tuple: of all messages, only these are made by the hundred in
    every step, and a frozen dataclass takes three times as long to make.

    token_ids: the new output tokens (a stop token that ended the answer is included). logprobs: one per new token,
    or None. finish_reason None means that more will come. prompt_tokens/completion_tokens/cached_tokens: totals.
    stop, skip_special_tokens, min_tokens: repeated from the sampling parameters in a request's first output only;
    prompt_logprobs come with that, too. hidden_states: float32 [n, hidden], those of the prompt's last token, or of the
    new tokens. stages: in a request's first and last output.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTokenOutput:
    """Scheduler -> DetokenizerManager, once a step."""

    outputs: tuple[TokenOutput, ...]


class TextOutput(NamedTuple):
    """New text of one request; a tuple for the reason that `TokenOutput` is one. `text` is a delta, whole UTF-8
    characters, never part of a stop string.

    token_ids/logprobs are those of the step even where their text is held back (it may be part of a stop string or
    an incomplete character): they come out with the delta that follows. Once a stop string matched, tokens after the
    one that completed it are dropped and completion_tokens does not count them. stages: the step's.
    """

    rid: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states: np.ndarray | None = None
    stages: StageTimes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTextOutput:
    """DetokenizerManager -> TokenizerManager."""

    outputs: tuple[TextOutput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedItem:
    """What became of one medium that was to be encoded ahead of time.

    temporal_patches: one for a picture; encoded: how many of them were computed. patches_encoded: the same in vision
    patches. saved: whether all of them are on disk and stay there through a crash; None where nothing is kept there.
    """

    modality: Modality
    temporal_patches: int
    encoded: int = 0
    patches_encoded: int = 0
    saved: bool | None = None

    @property
    def found(self) -> int:
        """Temporal patches that were cached."""
        return self.temporal_patches - self.encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOutput:
    """The answer to an `EncodeReqInput`: of each of its items. error: why there is none (message, status)."""

    rid: str
    items: tuple[EncodedItem, ...]
    error: FinishReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramStats:
    """How many values were at most each of `bounds`, and above the one before; the last of `counts`: above all."""

    bounds: tuple[int, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What `scheduler.meter` counts. encoding_reqs: requests that wait for embeddings now. The rest since the start:

    preempted_total: KV slots taken back from requests, running or in their prompts. prompt_tokens_computed_total: of
    prompts, also when computed again. prefix_queries_total, prefix_hits_total: tokens of computed prompts, and those of
    them that the prefix cache had. draft_tokens_total, accepted_tokens_total: guessed, and right. step_reqs,
    step_tokens: requests and tokens of each step of the model.
    """

    encoding_reqs: int = 0
    preempted_total: int = 0
    prompt_tokens_computed_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    step_reqs: HistogramStats = HistogramStats()
    step_tokens: HistogramStats = HistogramStats()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStats:
    """Of `--enable-eplb`. imbalance: how much the busiest party had to do before experts were placed anew the last
    time, in times of the mean; imbalance_after: what that placement would have made of it. 0 before the first one.
    rebalances_total, moved_total: placements, and experts that got another slot, since the start."""

    imbalance: float = 0.0
    imbalance_after: float = 0.0
    rebalances_total: int = 0
    moved_total: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Plain figures of the scheduler, for /metrics and tests. Token counts are KV slots. replica: whose they are."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_total_tokens: int
    kv_free_tokens: int
    kv_cached_tokens: int
    kv_locked_tokens: int
    req_pool_total: int
    req_pool_free: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generation_tokens_total: int
    encoder: PoolStats
    finished_total: int
    aborted_total: int
    retracted_total: int
    forward_steps_total: int
    num_warmups: int = 0
    steps: StepStats = StepStats()
    experts: ExpertStats = ExpertStats()
    replica: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestsLost:
    """A message about these requests could not be read, so none of them can be answered. message: for their clients.

    It is what whoever should have got that message gets, and goes on to the API process, which ends the requests.
    """

    rids: tuple[str, ...]
    message: str


SchedulerInput: TypeAlias = (
    TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | EncodeReqInput | AbortReq | GetStatsReq
)
SchedulerOutput: TypeAlias = BatchTokenOutput | EncodeOutput
DetokenizerInput: TypeAlias = SchedulerOutput | SchedulerStats | RequestsLost
TokenizerManagerInput: TypeAlias = BatchTextOutput | EncodeOutput | SchedulerStats | RequestsLost


def rids_of(message: object) -> tuple[str, ...]:
    """The requests that a message is about; none for one about the engine."""
    match message:
        case RequestsLost():
            return message.rids
        case BatchTokenizedGenerateReqInput():
            return tuple(request.rid for request in message.requests)
        case BatchTokenOutput() | BatchTextOutput():
            return tuple(output.rid for output in message.outputs)
        case TokenizedGenerateReqInput() | EncodeReqInput() | AbortReq() | EncodeOutput():
            return (message.rid,)
    return ()
