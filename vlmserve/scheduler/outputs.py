"""What the scheduler says of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmserve.ipc.messages import FinishReason, TokenizedGenerateReqInput, TokenLogprobs, TokenOutput
from vlmserve.scheduler.req import Req


def error(status: int, message: str, *, param: str | None = None) -> FinishReason:
    """Why a request ends without its whole answer, with an HTTP status. param: its field that is at fault."""
    return FinishReason(type="error", status=status, message=message, param=param)


def token_output(
    req: Req,
    tokens: Sequence[int],
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    hidden_states: np.ndarray | None = None,
) -> TokenOutput:
    """What a step brought a request."""
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
    )


def refused(message: TokenizedGenerateReqInput, reason: FinishReason) -> TokenOutput:
    """The only output of a request that is not taken."""
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
