"""Which logprobs a step is asked for, besides those of its tokens' own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmserve.executor.model_worker_batch import LogprobRows, PromptLogprobRows
from vlmserve.scheduler.req import Req


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
