"""What a step brought each of its requests, taken out of the arrays of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vlmserve.executor.model_worker_batch import ModelWorkerResult, RowLogprobs
from vlmserve.messages import TokenLogprobs
from vlmserve.scheduler.schedule_batch import ScheduleBatch, ScheduledReq


class PartResult(NamedTuple):
    """token: sampled, if one was. prompt: logprobs of prompt positions from `part.scored[0]` on. hidden: [1, hidden].
    failure: why the token means nothing."""

    part: ScheduledReq
    token: int | None
    logprobs: TokenLogprobs | None
    prompt: RowLogprobs | None
    hidden: np.ndarray | None
    failure: str | None


def part_results(batch: ScheduleBatch, result: ModelWorkerResult) -> Iterator[PartResult]:
    """In the order of the batch."""
    tokens = result.next_token_ids.tolist()
    failures = dict(result.failures)
    sampled = asked = scored = scored_asked = hidden = 0
    for part in batch.reqs:
        req, returns = part.req, part.req.returns
        num_ids = len(returns.token_ids_logprob)
        token = logprobs = prompt = state = failure = None
        if part.output_index is not None:
            at, sampled = sampled, sampled + 1
            token, failure = tokens[at], failures.get(at)
            if req.num_logprobs is not None or num_ids:
                logprobs = req.logprobs_of(
                    token,
                    result.logprobs[at],
                    result.top_ids[at],
                    result.top_logprobs[at],
                    result.asked_logprobs[asked : asked + num_ids],
                )
                asked += num_ids
        first, last = part.scored
        if last > first:
            rows = result.prompt_logprobs
            assert rows is not None
            here = slice(scored, scored + last - first)
            prompt = RowLogprobs(
                logprobs=rows.logprobs[here],
                ranks=rows.ranks[here],
                top_ids=rows.top_ids[here],
                top_logprobs=rows.top_logprobs[here],
                asked=rows.asked[scored_asked : scored_asked + (last - first) * num_ids],
            )
            scored, scored_asked = here.stop, scored_asked + (last - first) * num_ids
        if part.returns_hidden:
            assert result.hidden_states is not None
            state = result.hidden_states[hidden : hidden + 1]
            hidden += 1
        yield PartResult(part, token, logprobs, prompt, state, failure)
