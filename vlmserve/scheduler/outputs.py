"""The results of a step for each of its requests, and the messages made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vlmserve.executor.model_worker_batch import ModelWorkerResult, RowLogprobs
from vlmserve.ipc.messages import FinishReason, TokenizedGenerateReqInput, TokenLogprobs, TokenOutput
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.schedule_batch import ScheduleBatch, ScheduledReq


class PartResult(NamedTuple):
    """The results of a step for one of its requests.

    tokens: sampled ones; behind drafts, these are the drafts that were right and one more token, up to the answer's
    end. logprobs: of each token, if they are asked for. prompt: logprobs of prompt positions from `part.scored[0]` on.
    hidden: float32 [1, hidden]. failure: why the tokens mean nothing.
    """

    part: ScheduledReq
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt: RowLogprobs | None
    hidden: np.ndarray | None
    failure: str | None


def part_results(batch: ScheduleBatch, result: ModelWorkerResult) -> Iterator[PartResult]:
    """Cut a step's arrays into the results of its requests, in the order of the batch."""
    tokens = result.next_token_ids.tolist()
    failures = dict(result.failures)
    sampled = asked = scored = scored_asked = hidden = guessed = 0
    for part in batch.reqs:
        req, returns = part.req, part.req.returns
        num_ids = len(returns.token_ids_logprob)
        logprobs = prompt = state = failure = None
        first, sampled = sampled, sampled + part.tokens_sampled
        drafts = part.drafts
        if result.drafts is not None:
            drafts = tuple(result.drafts[guessed : guessed + len(drafts)].tolist())
            guessed += len(drafts)
        taken = _right(tokens[first:sampled], drafts, req.stop_ids)
        if taken:
            failure = failures.get(first)
            if (most := req.num_logprobs) is not None:
                logprobs = tuple(
                    TokenLogprobs(
                        token_id=token,
                        logprob=float(result.logprobs[at]),
                        top_ids=tuple(result.top_ids[at, :most].tolist()),
                        top_logprobs=tuple(result.top_logprobs[at, :most].tolist()),
                        token_ids_logprobs=tuple(
                            result.asked_logprobs[asked + num_ids * (at - first) :][:num_ids].tolist()
                        ),
                    )
                    for at, token in enumerate(taken, first)
                )
            asked += num_ids * part.tokens_sampled
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
        if part.hidden:
            assert result.hidden_states is not None
            state = result.hidden_states[hidden : hidden + 1]
            hidden += 1
        yield PartResult(part, taken, logprobs, prompt, state, failure)


def _right(tokens: list[int], drafts: tuple[int, ...], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the sampled tokens that belong to the answer: up to the first wrong draft, or to the answer's end."""
    right = 0
    while right < len(drafts) and tokens[right] == drafts[right] and tokens[right] not in stop_ids:
        right += 1
    return tuple(tokens[: right + 1])


def error(status: int, message: str, *, param: str | None = None) -> FinishReason:
    """Return why a request ends without its whole answer, with an HTTP status. param: the field that is at fault."""
    return FinishReason(type="error", status=status, message=message, param=param)


def token_output(
    req: Req,
    tokens: Sequence[int],
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    hidden_states: np.ndarray | None = None,
) -> TokenOutput:
    """Return the message of a request's new tokens."""
    first, req.reported = not req.reported, True
    scores = req.prompt_scores if first else None
    return TokenOutput(
        rid=req.rid,
        token_ids=tuple(tokens),
        finish_reason=req.finish_reason,
        prompt_tokens=req.prompt_len,
        completion_tokens=len(req.output_ids),
        cached_tokens=req.cached_tokens,
        logprobs=logprobs,
        first=first,
        stop=req.sampling_params.stop if first else (),
        skip_special_tokens=req.sampling_params.skip_special_tokens,
        prompt_logprobs=None if scores is None else scores.message(len(req.returns.token_ids_logprob)),
        hidden_states=hidden_states,
        stages=req.times.so_far() if first or req.finish_reason is not None else None,
        min_tokens=req.sampling_params.min_tokens if first else 0,
        include_stop=req.sampling_params.include_stop_str_in_output and first,
        guesses=req.guesses if req.guesses.steps else None,
    )


def refused(message: TokenizedGenerateReqInput, reason: FinishReason) -> TokenOutput:
    """Return the only output of a request that is not taken."""
    return TokenOutput(
        rid=message.rid,
        token_ids=(),
        finish_reason=reason,
        prompt_tokens=len(message.input_ids),
        completion_tokens=0,
        cached_tokens=0,
        first=True,
        stop=message.sampling_params.stop,
        skip_special_tokens=message.sampling_params.skip_special_tokens,
    )
