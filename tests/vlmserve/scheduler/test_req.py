"""Tokens and positions of any part of a request, across the end of its prompt, too; and the end of a request."""

from __future__ import annotations

import numpy as np
import pytest

from processors.inputs import MultimodalInputs
from tests.vision.fake_backend import FakeBackend, make_pool
from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.ipc.messages import FinishReason, SamplingParams, TokenizedGenerateReqInput
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_media import ReqMedia

PROMPT = np.arange(100, 105)
ANSWER = [7, 8, 9]
GRID = np.random.default_rng(0).integers(0, 50, (3, len(PROMPT)))
DELTA = -2


@pytest.mark.parametrize("with_media", [False, True])
def test_a_part_is_that_of_the_whole(with_media):
    media = MultimodalInputs(items=(), mrope_positions=GRID, mrope_position_delta=DELTA) if with_media else None
    message = TokenizedGenerateReqInput(
        rid="a", input_ids=PROMPT, sampling_params=SamplingParams(max_new_tokens=9), mm_inputs=media
    )
    req = Req(
        message,
        key_ids=PROMPT,
        media=ReqMedia(None, make_pool(FakeBackend()), order=0),
        max_new_tokens=9,
        eos_token_ids=frozenset(),
        arrival=0,
    )
    for token in ANSWER:
        req.append_output(token)
    req.in_flight = 1
    ids = [*PROMPT, *ANSWER, -1]
    prompt = GRID if with_media else np.tile(np.arange(5), (3, 1))
    places = np.concatenate([prompt, np.tile(np.arange(5, 9) + DELTA * with_media, (3, 1))], axis=1)
    for start in range(len(ids)):
        for end in range(start + 1, len(ids) + 1):
            assert req.fill_ids(start, end).tolist() == ids[start:end]
            assert req.positions(start, end).tolist() == places[:, start:end].tolist()


def test_a_request_ends_once():
    req = make_req(0)
    req.finish(FinishReason(type="length"))
    with pytest.raises(AssertionError):
        req.finish(FinishReason(type="abort"))
    assert (req.is_finished, req.finish_reason.type) == (True, "length")
