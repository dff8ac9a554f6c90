"""Checks of what a request wants besides its answer, and of the logits processors it calls."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.executor.logits_processors import LogitsProcessors
from vlmserve.frontend.sampling import MAX_TOP_LOGPROBS, check_range, check_token, refusal
from vlmserve.ipc.messages import LogitsProcessorCall, ReturnOptions, SamplingParams
from vlmserve_common.errors import BadRequestError

MAX_TOKEN_IDS_LOGPROB = 1024
MAX_LOGITS_PROCESSORS = 16


def verify_returns(returns: ReturnOptions, params: SamplingParams, *, vocab_size: int, hidden_states: bool) -> None:
    """BadRequestError naming the field, its value and what is allowed. hidden_states: the server returns them."""
    if returns.prompt_logprobs is not None:
        check_range("prompt_logprobs", returns.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    elif returns.logprob_start_len:
        raise refusal("logprob_start_len", returns.logprob_start_len, "left out without prompt_logprobs")
    if returns.logprob_start_len < 0:
        raise refusal("logprob_start_len", returns.logprob_start_len, "0 or more")
    if len(returns.token_ids_logprob) > MAX_TOKEN_IDS_LOGPROB:
        given = f"a list of {len(returns.token_ids_logprob)}"
        raise refusal("token_ids_logprob", given, f"at most {MAX_TOKEN_IDS_LOGPROB} token ids")
    for token in returns.token_ids_logprob:
        check_token("token_ids_logprob", token, vocab_size)
    if returns.temp_scaled_logprobs and params.temperature <= 0:
        allowed = f"false where temperature is {params.temperature:g}, which logits cannot be divided by"
        raise refusal("temp_scaled_logprobs", "true", allowed)
    if returns.hidden_states != "none" and not hidden_states:
        allowed = "false: this server does not return hidden states (setting --enable-return-hidden-states)"
        raise refusal("return_hidden_states", returns.hidden_states, allowed)


def verify_start(returns: ReturnOptions, length: int) -> None:
    """BadRequestError for a `logprob_start_len` behind a prompt of `length` tokens."""
    if returns.logprob_start_len >= length:
        raise refusal("logprob_start_len", returns.logprob_start_len, f"below {length}, the prompt's tokens")


def verify_logits_processors(calls: Sequence[LogitsProcessorCall], processors: LogitsProcessors) -> None:
    """BadRequestError for those that are not there, and for parameters that they refuse."""
    if len(calls) > MAX_LOGITS_PROCESSORS:
        raise refusal("logits_processors", f"a list of {len(calls)}", f"at most {MAX_LOGITS_PROCESSORS}")
    for call in calls:
        try:
            processors.check(call.name, call.params)
        except ValueError as error:
            raise BadRequestError(str(error), param="logits_processors", code="invalid_value") from None
