"""How the requests of a step are sampled, by all that is known at its launch, and which logprobs it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmserve.executor.model_worker_batch import LogitsProcessing, LogprobRows, PromptLogprobRows, SamplingBatchInfo
from vlmserve.scheduler.grammar.matcher import masks_of
from vlmserve.scheduler.req import Req

_NEVER = -1e9  # added to the logits of tokens that must not be sampled, unless no other token may be
_NO_IDS = np.zeros(0, dtype=np.int64)


class SamplingArrays:
    """Makes the `SamplingBatchInfo` of each step. Arrays that depend only on the requests are kept from step to step,
    as long as the same requests decode. They are never written to."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []
        self._kept = info_of([])
        self._by_history: list[int] = []
        self._ruled: list[tuple[int, Req]] = []
        self._by_length: list[int] = []

    def info(
        self, batch_indices: list[int], token_indices: np.ndarray, reqs: list[Req], output_indices: list[int]
    ) -> SamplingBatchInfo:
        """Return how a step is sampled. All lists have one entry for each token to sample.

        batch_indices: its request in the batch. token_indices: the batch token that it follows. reqs: its request.
        output_indices: its index in the answer.

        Logits processors and grammars see the tokens that are known now. Requests that have any of them must have no
        token in flight but guesses. Penalties may count tokens in flight: the worker gets the places of these tokens.
        """
        if reqs != self._reqs:
            self._reqs, self._kept = reqs, info_of(reqs)
            self._by_history = [i for i, req in enumerate(reqs) if req.is_penalised or req.logits_processors]
            self._by_length = [i for i, req in enumerate(reqs) if req.sampling_params.min_tokens]
            self._ruled = [(i, req) for i, req in enumerate(reqs) if req.grammar is not None]
        counts: list[tuple[int, int, int]] = []
        seen: list[np.ndarray] = []
        seen_of: list[int] = []
        processing: list[LogitsProcessing] = []
        in_flight: list[tuple[int, int]] = []
        for i in self._by_history:
            req, p = reqs[i], reqs[i].sampling_params
            known = np.asarray([*req.output_ids, *req.drafts][: output_indices[i]], dtype=np.int64)
            if req.is_penalised:
                in_flight += [(i, req.prompt_len + index) for index in range(len(known), output_indices[i])]
            if p.presence_penalty or p.frequency_penalty:
                ids, times = np.unique(known, return_counts=True)
                counts.extend((i, token, n) for token, n in zip(ids.tolist(), times.tolist(), strict=True))
            if p.repetition_penalty not in (None, 1):
                seen.append(np.unique(np.concatenate([req.prompt_token_ids, known])))
                seen_of.append(i)
            processing += [
                LogitsProcessing(
                    row=i, name=call.name, params=call.params, prompt_ids=req.prompt_token_ids, output_ids=known
                )
                for call in req.logits_processors
            ]
        short = [i for i in self._by_length if output_indices[i] < reqs[i].sampling_params.min_tokens]
        kept = _with_bias(self._kept, [(i, token, _NEVER) for i in short for token in sorted(reqs[i].stop_ids)])
        return replace(
            kept,
            batch_indices=_ints(batch_indices),
            token_indices=token_indices,
            output_indices=_ints(output_indices),
            count_rows=_ints([row for row, _, _ in counts]),
            count_ids=_ints([token for _, token, _ in counts]),
            count_values=_ints([n for _, _, n in counts]),
            seen_rows=np.repeat(_ints(seen_of), [len(ids) for ids in seen]) if seen else _NO_IDS,
            seen_ids=np.concatenate(seen) if seen else _NO_IDS,
            processing=tuple(processing),
            bitmasks=masks_of([(m, output_indices[i] - len(r.output_ids)) for i, r in self._ruled if (m := r.grammar)]),
            in_flight_rows=_ints([row for row, _ in in_flight]),
            in_flight_places=_ints([place for _, place in in_flight]),
        )


def info_of(reqs: Sequence[Req]) -> SamplingBatchInfo:
    """Return the part of a step's sampling that depends only on its requests; the arrays of a single step are empty."""
    params = [req.sampling_params for req in reqs]
    allowed = [(i, token) for i, p in enumerate(params) for token in p.allowed_token_ids or ()]
    bias = [(i, token, value) for i, p in enumerate(params) if p.logit_bias for token, value in p.logit_bias.items()]
    num_logprobs = [-1 if req.num_logprobs is None else req.num_logprobs for req in reqs]
    return SamplingBatchInfo(
        batch_indices=_NO_IDS,
        token_indices=_NO_IDS,
        output_indices=_NO_IDS,
        count_rows=_NO_IDS,
        count_ids=_NO_IDS,
        count_values=_NO_IDS,
        seen_rows=_NO_IDS,
        seen_ids=_NO_IDS,
        temperatures=_floats([p.temperature for p in params], left_out=1.0),
        top_ps=_floats([p.top_p for p in params], left_out=1.0),
        top_ks=_ints([-1 if p.top_k is None else p.top_k for p in params]),
        min_ps=_floats([p.min_p for p in params]),
        seeds=_ints([p.seed or 0 for p in params]),
        num_logprobs=_ints(num_logprobs),
        bias_rows=_ints([row for row, _, _ in bias]),
        bias_ids=_ints([token for _, token, _ in bias]),
        bias_values=_floats([value for _, _, value in bias]),
        allowed_rows=_ints([row for row, _ in allowed]),
        allowed_ids=_ints([token for _, token in allowed]),
        presence=_floats([p.presence_penalty for p in params]),
        frequency=_floats([p.frequency_penalty for p in params]),
        repetition=_floats([p.repetition_penalty for p in params], left_out=1.0),
        logprobs=output_rows(reqs, num_logprobs),
        masked_rows=_ints([i for i, req in enumerate(reqs) if req.grammar is not None]),
    )


def _with_bias(info: SamplingBatchInfo, more: Sequence[tuple[int, int, float]]) -> SamplingBatchInfo:
    if not more:
        return info
    rows, ids, values = zip(*more, strict=True)
    return replace(
        info,
        bias_rows=np.concatenate([info.bias_rows, _ints(rows)]),
        bias_ids=np.concatenate([info.bias_ids, _ints(ids)]),
        bias_values=np.concatenate([info.bias_values, _floats(values)]),
    )


def _floats(values: Sequence[float | None], *, left_out: float = 0.0) -> np.ndarray:
    """left_out: the neutral value, for a request that has none."""
    return np.array([left_out if value is None else value for value in values], dtype=np.float32)


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64) if values else _NO_IDS


def output_rows(reqs: Sequence[Req], num_logprobs: Sequence[int]) -> LogprobRows | None:
    """Of requests that get a token; None where nothing is asked but the usual."""
    if not any(req.asks_more_of_logprobs for req in reqs):
        return None
    return _rows(reqs, num_logprobs)


def prompt_rows(found: Sequence[tuple[Req, int, int, int]]) -> PromptLogprobRows | None:
    """found: a request, positions [first, last) of its prompt, and the batch token that the first of them follows."""
    found = [(req, first, last, token) for req, first, last, token in found if last > first]
    if not found:
        return None
    owners = [req for req, first, last, _ in found for _ in range(last - first)]
    return PromptLogprobRows(
        tokens=np.concatenate([np.arange(token, token + last - first) for _, first, last, token in found]),
        targets=np.concatenate([req.origin_input_ids[first:last] for req, first, last, _ in found]),
        rows=_rows(owners, [req.returns.prompt_logprobs or 0 for req in owners]),
    )


def _rows(owners: Sequence[Req], tops: Sequence[int]) -> LogprobRows:
    returns = [req.returns for req in owners]
    params = [req.sampling_params for req in owners]
    asked = [options.token_ids_logprob for options in returns]
    pairs = list(zip(returns, params, strict=True))
    return LogprobRows(
        tops=np.array(tops, dtype=np.int64),
        temperatures=np.array(
            [p.temperature if r.temp_scaled_logprobs and p.temperature is not None else 1 for r, p in pairs],
            dtype=np.float32,
        ),
        top_ps=np.array([p.top_p if r.top_p_normalized_logprobs else 1 for r, p in pairs], dtype=np.float32),
        asked_rows=np.repeat(np.arange(len(owners)), [len(ids) for ids in asked]),
        asked_ids=np.array([token for ids in asked for token in ids], dtype=np.int64),
    )
