"""Every move between two statuses, allowed or not, spelled out."""

from __future__ import annotations

import pytest

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.ipc.messages import FinishReason
from vlmserve.scheduler.req_life import ReqStatus as S

BLOCKED = (S.WAITING_FOR_ENCODER, S.WAITING_FOR_GRAMMAR, S.WAITING_FOR_REMOTE_KV)
ALLOWED = {
    *((S.WAITING, blocked) for blocked in BLOCKED),
    *((S.RETRACTED, blocked) for blocked in BLOCKED),
    *((blocked, S.WAITING) for blocked in BLOCKED),
    *((queued, S.PREFILLING) for queued in (S.WAITING, S.RETRACTED, *BLOCKED)),
    (S.PREFILLING, S.DECODING),
    (S.PREFILLING, S.RETRACTED),
    (S.DECODING, S.RETRACTED),
    *((status, S.FINISHED) for status in S if status is not S.FINISHED),
}


@pytest.mark.parametrize("before", S)
@pytest.mark.parametrize("after", S)
def test_moves(before, after):
    req = make_req(0)
    req.status = before
    if (before, after) in ALLOWED:
        req.move_to(after)
        assert req.status is after
    else:
        with pytest.raises(AssertionError, match="r0"):
            req.move_to(after)
        assert req.status is before


def test_who_is_in_the_queue():
    assert {status for status in S if status.is_queued} == {S.WAITING, S.RETRACTED, *BLOCKED}
    assert {status for status in S if status.is_blocked} == set(BLOCKED)


def test_the_end_is_final():
    req = make_req(0)
    assert not req.is_finished
    req.finish(FinishReason(type="length"))
    assert req.is_finished
    assert req.finish_reason.type == "length"
    with pytest.raises(AssertionError):
        req.finish(FinishReason(type="abort"))
