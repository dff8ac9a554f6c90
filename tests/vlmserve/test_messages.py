"""Of every message it is known whom it is about."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from vlmserve.ipc.messages import (
    AbortReq,
    BatchTextOutput,
    BatchTokenizedGenerateReqInput,
    BatchTokenOutput,
    DetokenizerInput,
    EncodeOutput,
    EncodeReqInput,
    GetStatsReq,
    RequestsLost,
    SamplingParams,
    SchedulerInput,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenizerManagerInput,
    TokenOutput,
    rids_of,
)

ABOUT_THE_ENGINE = {GetStatsReq, SchedulerStats}
COUNTS: dict[str, Any] = {"finish_reason": None, "prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}


def request(rid: str) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(rid=rid, input_ids=np.zeros(1, np.int64), sampling_params=SamplingParams())


MESSAGES = [
    (request("a"), ("a",)),
    (BatchTokenizedGenerateReqInput(requests=(request("a"), request("b"))), ("a", "b")),
    (EncodeReqInput(rid="a", items=()), ("a",)),
    (AbortReq(rid="a"), ("a",)),
    (BatchTokenOutput(outputs=tuple(TokenOutput(rid=rid, token_ids=(), **COUNTS) for rid in "ab")), ("a", "b")),
    (BatchTextOutput(outputs=tuple(TokenOutput(rid=rid, text="", token_ids=(), **COUNTS) for rid in "ab")), ("a", "b")),
    (EncodeOutput(rid="a", items=()), ("a",)),
    (RequestsLost(rids=("a", "b"), message=""), ("a", "b")),
]


@pytest.mark.parametrize(("message", "rids"), MESSAGES, ids=lambda value: type(value).__name__)
def test_the_requests_of_a_message(message: object, rids: tuple[str, ...]) -> None:
    assert rids_of(message) == rids


def test_none_is_missing_here() -> None:
    types = {*get_args(SchedulerInput), *get_args(DetokenizerInput), *get_args(TokenizerManagerInput)}
    assert {type(message) for message, _ in MESSAGES} == types - ABOUT_THE_ENGINE
    assert rids_of(GetStatsReq()) == ()
