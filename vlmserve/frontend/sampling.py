"""Checks of sampling, logprobs and logits processors that a request asks for; server defaults; seeds of choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vlmserve.ipc.messages import LogitsProcessorCall, ReturnOptions, SamplingParams
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    from vlmserve.executor.logits_processors import LogitsProcessors

SamplingOverrides = SamplingParams
"""An older name that users' code may have."""

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKEN_IDS_LOGPROB = 1024
MAX_LOGITS_PROCESSORS = 16
SAMPLING_LISTS = ("stop", "stop_token_ids", "allowed_token_ids")
"""The fields of `SamplingParams` that are tuples, and that clients write as lists."""
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """The server's values for fields that a request leaves out (OpenAI's own unless made otherwise)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def apply(self, given: SamplingParams, *, seed: int = 0) -> SamplingParams:
        """Fill in all that `given` leaves out. seed: for a request without one."""
        values = {one.name: getattr(self, one.name) for one in fields(self)} | {"seed": seed}
        return replace(given, **{name: value for name, value in values.items() if getattr(given, name) is None})


def load_sampling_defaults(folder: Path, source: Literal["model", "openai"] = "model") -> SamplingDefaults:
    """Read the checkpoint's generation_config.json, or take OpenAI's values. do_sample false means greedy."""
    config = read_json(folder, "generation_config.json", required=False) if source == "model" else {}
    if config.get("do_sample") is False:
        config = {"temperature": 0.0, "repetition_penalty": config.get("repetition_penalty")}
    known = [field.name for field in fields(SamplingDefaults)]
    return SamplingDefaults(**{name: config[name] for name in known if config.get(name) is not None})


def verify_sampling_params(params: SamplingParams, *, vocab_size: int, least_tokens: int = 1) -> SamplingParams:
    """Return the same parameters, or raise BadRequestError naming the field, its value and the values allowed.

    vocab_size: ids the model knows; those that the parameters name must be below. least_tokens: 0 where
    the request returns something besides an answer.
    """
    for name, high in (("temperature", 2), ("top_p", 1), ("min_p", 1)):
        check_range(name, getattr(params, name), 0, high)
    check_range("presence_penalty", params.presence_penalty, -2, 2)
    check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.repetition_penalty is not None and not 0 < params.repetition_penalty <= 2:
        raise refusal("repetition_penalty", params.repetition_penalty, "above 0 and at most 2")
    if params.top_k is not None and not -1 <= params.top_k < 1 << 31:
        raise refusal("top_k", params.top_k, "-1 or 0 (off) or a positive number of tokens")
    if params.max_new_tokens is not None and params.max_new_tokens < least_tokens:
        allowed = f"at least {least_tokens}"
        if params.max_new_tokens == 0:
            allowed += ", or 0 with prompt_logprobs or return_hidden_states"
        raise refusal("max_tokens", params.max_new_tokens, allowed)
    if params.min_tokens < 0:
        raise refusal("min_tokens", params.min_tokens, "0 or more")
    if params.max_new_tokens is not None:
        check_min_tokens(params.min_tokens, params.max_new_tokens)
    check_most("stop", params.stop, MAX_STOP_STRINGS, " strings")
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise refusal("stop", f"a string of {len(stop)} characters", f"1 to {MAX_STOP_CHARS} characters long")
    check_most("logit_bias", params.logit_bias, MAX_LOGIT_BIAS, " tokens")
    for token, bias in params.logit_bias.items():
        check_token("logit_bias", token, vocab_size)
        check_range("logit_bias", bias, -100, 100)
    check_most("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS, " token ids")
    for token in params.stop_token_ids:
        check_token("stop_token_ids", token, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise refusal("allowed_token_ids", "an empty list", "a list of one token id or more, or left out")
        check_most("allowed_token_ids", params.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, " token ids")
        for token in params.allowed_token_ids:
            check_token("allowed_token_ids", token, vocab_size)
    return params


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raise BadRequestError if the shortest answer allowed is longer than the longest one."""
    if min_tokens > max_tokens:
        raise refusal("min_tokens", min_tokens, f"at most {max_tokens}, the tokens that the answer may have")


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`, 0 <= result < 2**63.

    Choice 0 has the request's own seed, so that n=1 is the first choice of n=2. Later choices have SplitMix64's output
    number `index` from that seed (Steele, Lea, Flood 2014).
    """
    if index == 0:
        return seed & (_UINT64 >> 1)
    state = (seed + index * 0x9E3779B97F4A7C15) & _UINT64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64
    return (state ^ (state >> 31)) >> 1


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raise BadRequestError unless low <= value <= high, or the value is left out."""
    if value is not None and not low <= value <= high:  # not a number is not in between either
        raise refusal(name, value, f"between {low} and {high}")


def check_most(name: str, items: Sized, most: int, what: str = "") -> None:
    """Raise BadRequestError for too many items. what: the word for them, behind a blank."""
    if len(items) > most:
        kind = "map" if isinstance(items, Mapping) else "list"
        raise refusal(name, f"a {kind} of {len(items)}", f"at most {most}{what}")


def check_token(name: str, token: int, vocab_size: int) -> None:
    """Raise BadRequestError for an id that the model does not know."""
    if not 0 <= token < vocab_size:
        raise refusal(name, f"token id {token}", f"token ids below {vocab_size}, the size of the model's vocabulary")


def refusal(name: str, value: object, allowed: str) -> BadRequestError:
    """Make the error for a field whose value is not allowed."""
    return BadRequestError(f"{name} is {value}; it must be {allowed}", param=name, code="invalid_value")


def verify_returns(returns: ReturnOptions, params: SamplingParams, *, vocab_size: int, hidden_states: bool) -> None:
    """Raise BadRequestError naming the field, its value and the values allowed. hidden_states: the server returns
    them."""
    if returns.prompt_logprobs is not None:
        check_range("prompt_logprobs", returns.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    elif returns.logprob_start_len:
        raise refusal("logprob_start_len", returns.logprob_start_len, "left out without prompt_logprobs")
    if returns.logprob_start_len < 0:
        raise refusal("logprob_start_len", returns.logprob_start_len, "0 or more")
    check_most("token_ids_logprob", returns.token_ids_logprob, MAX_TOKEN_IDS_LOGPROB, " token ids")
    for token in returns.token_ids_logprob:
        check_token("token_ids_logprob", token, vocab_size)
    if returns.temp_scaled_logprobs and not params.temperature:
        allowed = "false where temperature is 0, which logits cannot be divided by"
        raise refusal("temp_scaled_logprobs", "true", allowed)
    if returns.hidden_states != "none" and not hidden_states:
        allowed = "false: this server does not return hidden states (setting --enable-return-hidden-states)"
        raise refusal("return_hidden_states", returns.hidden_states, allowed)


def verify_dimensions(dimensions: int | None, width: int, trained: Sequence[int]) -> None:
    """Raise BadRequestError unless a model's vectors of `width` numbers can be cut to so many. trained: the numbers of
    dimensions that it was trained for; none: any."""
    if dimensions is None or (1 <= dimensions <= width and (not trained or dimensions in trained)):
        return
    allowed = f"one of {', '.join(map(str, trained))}" if trained else f"between 1 and {width}"
    raise refusal("dimensions", dimensions, allowed)


def verify_logits_processors(calls: Sequence[LogitsProcessorCall], processors: LogitsProcessors) -> None:
    """Raise BadRequestError for a processor that the server does not have, and for parameters that one refuses."""
    check_most("logits_processors", calls, MAX_LOGITS_PROCESSORS)
    for call in calls:
        try:
            processors.check(call.name, call.params)
        except ValueError as error:
            raise BadRequestError(str(error), param="logits_processors", code="invalid_value") from None
