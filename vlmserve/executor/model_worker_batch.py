"""The message of one step, scheduler -> worker, and its answer: frozen, encodable, and all that a worker needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from vlmserve.memory.kv_transfer import KVCopyJob
from vlmserve.memory.recurrent_states import StateAdvance, StateCopy


def _no_ids() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class MMEmbeds:
    """Vision embeddings [n, width], DeepStack's included, for batch tokens token .. token + n - 1. They may be on the
    worker's device already."""

    token: int
    embeds: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixSlots:
    """A request begins (or begins again) with `slots` int64 [prefix_len] already holding its KV. window_slots: those
    of layers with windows, if these have slots of their own; any for tokens that no window holds."""

    req_pool_idx: int
    slots: np.ndarray
    window_slots: np.ndarray = field(default_factory=_no_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSnapshot:
    """Keep, as state `target`, the state of request number `index` behind its first `tokens` tokens of this step, above
    0."""

    index: int
    tokens: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRows:
    """The logprobs that are wanted of R rows of logits.

    tops: int64 [R], how many of the likeliest tokens are named; -1: no logprobs of the row are wanted. temperatures,
    top_ps: float32 [R], the distribution that logprobs are of; 1 and 1 is the model's own. asked_rows, asked_ids: int64
    [K] pairs, rows ascending: tokens whose logprobs are wanted besides.
    """

    tops: np.ndarray
    temperatures: np.ndarray
    top_ps: np.ndarray
    asked_rows: np.ndarray
    asked_ids: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLogprobs:
    """Logprobs of R rows. logprobs float32 [R], ranks int64 [R] (1 is the likeliest): of one token a row. top_ids
    int64, top_logprobs float32 [R, K]: best first, K the largest number asked for. asked: float32 [number of pairs]."""

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    asked: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobRows:
    """Logprobs of prompt tokens. tokens: int64 [R], batch tokens; targets: int64 [R], the ids that follow them."""

    tokens: np.ndarray
    targets: np.ndarray
    rows: LogprobRows


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsProcessing:
    """A logits processor by its name, for number `row` of the requests that get a token. prompt_ids, output_ids: int64,
    all of the request's tokens so far; no prompt_ids if embeddings replace them."""

    row: int
    name: str
    params: dict[str, Any]
    prompt_ids: np.ndarray
    output_ids: np.ndarray


RECENT_TOKENS = 8
"""The number of last sampled tokens that a worker knows of each request."""

NO_MASKS = np.zeros((0, 0), dtype=np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatchInfo:
    """The sampling of the S requests that get a token. Arrays have length S unless said otherwise.

    batch_indices: int64, their numbers in the batch, ascending. A request with drafts (see `ModelWorkerBatch`) is there
    as often as it has tokens. token_indices: int64, the batch token that each of the S follows. temperatures, top_ps,
    min_ps: float32. top_ks: int64, <= 0 is off. seeds, output_indices: int64; sampling noise depends on these two only.
    num_logprobs: int64, -1 is none. bias_*: [K] triples (index among the S, token id, value added to the logit).
    allowed_*: [K] pairs (index among the S, token id) of requests that allow only some tokens.
    count_*: [K] triples (index among the S, token id, times it was produced so far) of requests with penalties, by
    index and id. presence, frequency: float32 penalties. seen_*: [K] pairs (index among the S, token id) of the tokens
    of prompt and answer, of requests with a repetition penalty. repetition: float32, 1 is none. in_flight_*: int64 [U]
    pairs (index among the S, its number among the tokens of its request) of tokens that only the worker knows, of
    requests with any penalty: the last `RECENT_TOKENS` of a request at the most. logprobs: of the S rows, if a request
    wants more than `num_logprobs`. processing: in the order of application. masked_rows: int64 [G], indices among the S
    of requests with a grammar. bitmasks: int32 [G, ceil(vocab / 32)], a bit for each token, the lowest first. A bit is
    1 if its token may come next.
    """

    batch_indices: np.ndarray
    token_indices: np.ndarray
    temperatures: np.ndarray
    top_ps: np.ndarray
    top_ks: np.ndarray
    min_ps: np.ndarray
    seeds: np.ndarray
    output_indices: np.ndarray
    num_logprobs: np.ndarray
    bias_rows: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    count_rows: np.ndarray
    count_ids: np.ndarray
    count_values: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    seen_rows: np.ndarray
    seen_ids: np.ndarray
    repetition: np.ndarray
    logprobs: LogprobRows | None = None
    processing: tuple[LogitsProcessing, ...] = ()
    masked_rows: np.ndarray = field(default_factory=_no_ids)
    bitmasks: np.ndarray = field(default_factory=lambda: NO_MASKS)
    in_flight_rows: np.ndarray = field(default_factory=_no_ids)
    in_flight_places: np.ndarray = field(default_factory=_no_ids)
    allowed_rows: np.ndarray = field(default_factory=_no_ids)
    allowed_ids: np.ndarray = field(default_factory=_no_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWorkerBatch:
    """One step over N tokens of B requests, tokens of a request side by side.

    req_pool_indices int64 [B]. input_ids int64 [N]: real ids; -1 stands for the token sampled last at that
    req_pool_idx, which the worker knows and the host may not yet. num_drafts: int64 [B], how many of a request's last
    tokens are guesses; empty if none are. Guesses that are -1 are made by the worker. It samples a token behind each
    guess, and the scheduler sees from these how many guesses were right. positions int64 [3, N]. positions_before:
    int64 [3, B], of each request's last token before this step; any if there is none. seq_lens, prefix_lens int64 [B]:
    lengths after and before this step. out_cache_loc int64 [N]: KV slots to write. window_cache_loc: the same of layers
    with windows, empty unless these have slots of their own. mm_embeds: in the order of their tokens. input_embeds: [n,
    hidden] each, given in place of token ids. hidden_tokens: int64 [H], batch tokens whose final hidden states are
    returned. hidden_counts: int64 [H], the sum over so many tokens is, of which that one is the last; empty if all
    are 1. kv_copies: between the tiers of the KV cache, to be done first. states: int64 [B], where recurrent layers
    have the state of each request, none for models without such layers. state_copies: to be done first, in this order.
    state_advances: to be done behind them. state_snapshots: to be made. adapters: digests of the requests' adapters, ""
    for none; empty if no request has one.
    """

    step: int
    forward_mode: int
    req_pool_indices: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    positions_before: np.ndarray
    seq_lens: np.ndarray
    prefix_lens: np.ndarray
    out_cache_loc: np.ndarray
    prefix_slots: tuple[PrefixSlots, ...]
    mm_embeds: tuple[MMEmbeds, ...]
    window_cache_loc: np.ndarray = field(default_factory=_no_ids)
    input_embeds: tuple[MMEmbeds, ...] = ()
    prompt_logprobs: PromptLogprobRows | None = None
    hidden_tokens: np.ndarray = field(default_factory=_no_ids)
    hidden_counts: np.ndarray = field(default_factory=_no_ids)
    kv_copies: tuple[KVCopyJob, ...] = ()
    num_drafts: np.ndarray = field(default_factory=_no_ids)
    states: np.ndarray = field(default_factory=_no_ids)
    state_copies: tuple[StateCopy, ...] = ()
    state_advances: tuple[StateAdvance, ...] = ()
    state_snapshots: tuple[StateSnapshot, ...] = ()
    adapters: tuple[str, ...] = ()


def without_returns(batch: ModelWorkerBatch) -> ModelWorkerBatch:
    """Return the step of a process that does not sample: it returns nothing besides tokens."""
    return replace(batch, prompt_logprobs=None, hidden_tokens=_no_ids())


class PendingResult(Protocol):
    """The answer of `ModelWorker.sample`: the result, or a handle that waits for it."""

    def result(self) -> ModelWorkerResult:
        """Waits for it; raises what went wrong on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWorkerResult:
    """compute_s: seconds that the step took. next_token_ids int64 [S]; logprobs float32 [S] of these; top_ids int64 and
    top_logprobs float32 [S, K], K the largest num_logprobs asked for (0 columns if none). Logprobs are NaN for requests
    that did not ask. asked_logprobs: float32, for each pair of `SamplingBatchInfo.logprobs`. hidden_states: float32 [H,
    hidden]. drafts: int64, all guesses of the step in their order, if the worker made them. failures: numbers among the
    S, and why: their tokens mean nothing."""

    step: int
    compute_s: float
    next_token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    asked_logprobs: np.ndarray = field(default_factory=_no_ids)
    prompt_logprobs: RowLogprobs | None = None
    hidden_states: np.ndarray | None = None
    drafts: np.ndarray | None = None
    failures: tuple[tuple[int, str], ...] = ()

    def result(self) -> ModelWorkerResult:
        """Itself: see `PendingResult`."""
        return self
