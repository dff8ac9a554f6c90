"""Guessed tokens: what is guessed, and that a step brings as many as were right and no more."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.vlmserve.scheduler.prompts import expected, request
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.scheduler.drafts import NGramDrafter
from vlmserve.scheduler.req_life import ReqStatus
from vlmserve.scheduler.request_states import RequestStates


def propose(prompt: list[int], output: list[int]) -> tuple[int, ...]:
    req = SimpleNamespace(prompt_token_ids=np.array(prompt, np.int64), output_ids=output)
    return NGramDrafter(3).propose(req)


@pytest.mark.parametrize(
    ("prompt", "output", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6], [2, 3], (4, 5, 6)),
        ([1, 2, 3, 4], [9, 2, 3], (4, 9, 2)),  # goes on into the answer
        ([1, 2, 3, 7], [2, 3, 8, 2, 3], (8, 2, 3)),  # the later place
        ([1, 2, 3, 7], [9, 2, 3, 8, 1, 2, 3], (7, 9, 2)),  # the place where more is alike
        ([5, 6, 7], [7], ()),  # one token says nothing
        ([], [4], ()),
        ([4, 4], [4], (4, 4, 4)),  # a loop goes on
        ([7, 1, 2], [1, 2, 1, 2], (1, 2, 1)),
        ([2, 3, 9, 3], [2, 3], (9, 3, 2)),  # where its beginning is the prompt's
    ],
)
def test_what_followed_the_last_tokens_before_is_guessed(prompt, output, drafts):
    assert propose(prompt, output) == drafts


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_that_are_right_save_steps(depth):
    message = request("a", [1, 2, 3], new=24)
    steps = []
    for drafts in (0, 4):
        rig = Rig(Knobs(depth=depth, drafts=drafts))
        rig.run(message)
        rig.check_answers(message)
        steps.append(len(rig.worker.batches))
    stats = rig.loop.stats().steps
    assert steps[1] == steps[0] - stats.guesses.right
    assert 8 < stats.guesses.right < stats.guesses.tokens
    outputs = rig.outputs["a"]  # each has the right guesses of its step, and one more token
    assert stats.guesses.right_at == tuple(sum(len(out.token_ids) > at + 1 for out in outputs) for at in range(4))
    assert outputs[-1].guesses == stats.guesses


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_ends_the_answer_there_among_guesses_too(place, drafts):
    message = request("a", [4, 5, 6], new=20)
    want = expected(message)
    stop = want[place]
    cut = want.index(stop) + 1
    rig = Rig(Knobs(drafts=drafts))
    rig.messages["a"] = message
    rig.run(request("a", [4, 5, 6], new=20, stop_token_ids=(stop,)))
    assert rig.tokens["a"] == want[:cut]
    assert rig.finish["a"].matched == stop
    rig.check_nothing_is_left()


def test_nothing_is_guessed_where_slots_are_short():
    rig = Rig(Knobs(pool=32, page=1, context=32, drafts=30))
    message = request("a", list(range(20)), new=10)
    rig.run(message)
    assert 0 < rig.loop.stats().steps.guesses.tokens < 30
    rig.check_answers(message)


def test_a_request_taken_back_behind_guesses_begins_with_another_state(monkeypatch):
    """Its state lacked tokens that were right; the new one lacks none."""
    plain, lacking = RequestStates.end, []

    def end(self, req):
        lacking.extend([req.state_lag] if req.status is ReqStatus.DECODING else [])
        plain(self, req)

    monkeypatch.setattr(RequestStates, "end", end)
    rig = Rig(Knobs(drafts=4, snapshots=3, pool=128, context=64, conservativeness=0.001))
    messages = [request(f"r{i}", [i] * (8 + i), new=30) for i in range(5)]
    rig.run(*messages)
    rig.check_answers(*messages)
    assert any(lacking)
