"""How the requests of a step are sampled: of what is known when their turn comes (see `Scheduler.run_batch`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmserve.executor.model_worker_batch import LogitsProcessing, SamplingBatchInfo
from vlmserve.scheduler.grammar.matcher import Matcher, masks_of
from vlmserve.scheduler.logprob_rows import output_rows
from vlmserve.scheduler.req import Req

_NEVER = -1e9  # added to logits of tokens that are not to be sampled, unless nothing else may be
_NO_FLOATS = np.zeros(0, dtype=np.float32)
_NO_IDS = np.zeros(0, dtype=np.int64)


class SamplingArrays:
    """What of `SamplingBatchInfo` depends on nothing but who is sampled. As long as the same requests decode, step
    after step, that is the same: nobody writes to these arrays."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []
        self._arrays = _arrays_of([])
        self._by_history: list[int] = []
        self._masked_rows = _NO_IDS
        self._matchers: list[Matcher] = []
        self._by_length: list[int] = []

    def info(
        self, batch_indices: list[int], token_indices: np.ndarray, reqs: list[Req], output_indices: list[int]
    ) -> SamplingBatchInfo:
        """batch_indices: which requests of the step get a token. token_indices: the batch token it follows. reqs:
        these. output_indices: of that token in its answer.

        Logits processors and grammars are of the tokens that are known now: those in flight must have come, for
        requests that have any. Of tokens that penalties need and are in flight, their places are told.
        """
        if reqs != self._reqs:
            self._reqs, self._arrays = reqs, _arrays_of(reqs)
            self._by_history = [i for i, req in enumerate(reqs) if req.is_penalised or req.logits_processors]
            self._by_length = [i for i, req in enumerate(reqs) if req.sampling_params.min_tokens]
            self._masked_rows = _ints([i for i, req in enumerate(reqs) if req.grammar is not None])
            self._matchers = [req.grammar for req in reqs if req.grammar is not None]
        counts: list[tuple[int, int, int]] = []
        seen: list[np.ndarray] = []
        seen_of: list[int] = []
        processing: list[LogitsProcessing] = []
        in_flight: list[tuple[int, int]] = []
        for i in self._by_history:
            req, p = reqs[i], reqs[i].sampling_params
            known = np.asarray(req.output_ids[: output_indices[i]], dtype=np.int64)
            if req.is_penalised:
                in_flight += [(i, req.prompt_len + index) for index in range(len(known), output_indices[i])]
            if p.presence_penalty or p.frequency_penalty:
                ids, times = np.unique(known, return_counts=True)
                counts.extend((i, token, n) for token, n in zip(ids.tolist(), times.tolist(), strict=True))
            if p.repetition_penalty != 1:
                seen.append(np.unique(np.concatenate([req.prompt_token_ids, known])))
                seen_of.append(i)
            processing += [
                LogitsProcessing(
                    row=i, name=call.name, params=call.params, prompt_ids=req.prompt_token_ids, output_ids=known
                )
                for call in req.logits_processors
            ]
        arrays = self._arrays
        short = [i for i in self._by_length if output_indices[i] < reqs[i].sampling_params.min_tokens]
        if short:
            arrays = _with_bias(arrays, [(i, token, _NEVER) for i in short for token in sorted(reqs[i].stop_ids)])
        return SamplingBatchInfo(
            **arrays,
            batch_indices=_ints(batch_indices),
            token_indices=token_indices,
            output_indices=_ints(output_indices),
            count_rows=_ints([row for row, _, _ in counts]),
            count_ids=_ints([token for _, token, _ in counts]),
            count_values=_ints([n for _, _, n in counts]),
            seen_rows=np.repeat(_ints(seen_of), [len(ids) for ids in seen]) if seen else _NO_IDS,
            seen_ids=np.concatenate(seen) if seen else _NO_IDS,
            processing=tuple(processing),
            masked_rows=self._masked_rows,
            bitmasks=masks_of(self._matchers),
            in_flight_rows=_ints([row for row, _ in in_flight]),
            in_flight_places=_ints([place for _, place in in_flight]),
        )


def _arrays_of(reqs: Sequence[Req]) -> dict[str, Any]:
    params = [req.sampling_params for req in reqs]
    bias = [(i, token, value) for i, p in enumerate(params) if p.logit_bias for token, value in p.logit_bias.items()]
    num_logprobs = [-1 if req.num_logprobs is None else req.num_logprobs for req in reqs]
    return {
        "temperatures": _floats([p.temperature for p in params]),
        "top_ps": _floats([p.top_p for p in params]),
        "top_ks": _ints([p.top_k for p in params]),
        "min_ps": _floats([p.min_p for p in params]),
        "seeds": _ints([p.seed for p in params]),
        "num_logprobs": _ints(num_logprobs),
        "bias_rows": _ints([row for row, _, _ in bias]),
        "bias_ids": _ints([token for _, token, _ in bias]),
        "bias_values": _floats([value for _, _, value in bias]),
        "presence": _floats([p.presence_penalty for p in params]),
        "frequency": _floats([p.frequency_penalty for p in params]),
        "repetition": _floats([p.repetition_penalty for p in params]),
        "logprobs": output_rows(reqs, num_logprobs),
    }


def _with_bias(arrays: dict[str, Any], more: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    rows, ids, values = zip(*more, strict=True) if more else ((), (), ())
    return {
        **arrays,
        "bias_rows": np.concatenate([arrays["bias_rows"], _ints(rows)]),
        "bias_ids": np.concatenate([arrays["bias_ids"], _ints(ids)]),
        "bias_values": np.concatenate([arrays["bias_values"], _floats(values)]),
    }


def _floats(values: Sequence[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32) if values else _NO_FLOATS


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64) if values else _NO_IDS
