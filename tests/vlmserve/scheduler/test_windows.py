"""Layers with windows that have slots of their own: right answers, whoever shares what, in as much memory as windows
take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import ABORTS, GAPS, Knobs, Rig, knobs, requests

SMALL = Knobs(window=10, window_slots=64, page=4, chunk=16, context=1000, pool=1024)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=requests(),
    sessions=st.lists(st.sampled_from(["", "", "a", "b"]), min_size=10, max_size=10),
    knobs=knobs(windows=True),
    gaps=GAPS,
    aborts=ABORTS,
)
def test_answers_do_not_depend_on_the_schedule(messages, sessions, knobs, gaps, aborts):
    """The fake worker sees that the window of each token is there; `Rig.check` sees who holds what after each turn."""
    rig = Rig(knobs)
    messages = [replace(one, session_id=name or None) for one, name in zip(messages, sessions, strict=False)]
    aborted = rig.play(messages, gaps, aborts)
    rig.check_answers(*(message for message in messages if message.rid not in aborted))
    rig.scheduler.sessions.release_all()
    rig.check_nothing_is_left()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("radix", [True, False])
def test_long_answers_and_prompts_take_a_window_and_a_chunk(depth, radix):
    rig = Rig(replace(SMALL, depth=depth, radix=radix))
    messages = request("answer", [1, 2, 3], new=500), request("prompt", [4] * 500, new=5)
    rig.run(*messages)
    rig.check_answers(*messages)
    assert rig.scheduler.stats().retracted_total == 0
    rig.check_nothing_is_left()


def test_a_prefix_is_used_as_far_as_its_window_is_there():
    rig = Rig(replace(SMALL, sessions=0, window_slots=128))
    prompt = list(range(40))
    rig.run(request("a", prompt))
    rig.run(request("again", prompt), request("longer", [*prompt, 5, 6]), request("shorter", [*prompt[:22], 7]))
    assert [rig.cached[rid] for rid in ("again", "longer", "shorter")] == [36, 40, 20]
    rig.run(request("other", [9] * 100))  # takes what prompts have besides the windows that they end with
    rig.run(request("once more", prompt), request("shorter again", [*prompt[:22], 7]))
    assert [rig.cached[rid] for rid in ("once more", "shorter again")] == [36, 20]
    for n in range(12):
        rig.run(request(f"r{n}", [50 + n] * 40))
    rig.run(request("at last", prompt))
    assert rig.kv.prefix_cache.match_len(np.arange(36)) == 36
    assert rig.cached["at last"] == 0


def test_a_session_keeps_its_last_window():
    rig = Rig(SMALL)
    prompt = list(range(40))
    rig.run(replace(request("a", prompt), session_id="s"))
    for n in range(4):
        rig.run(request(f"r{n}", [50 + n] * 40))
    rig.run(replace(request("b", [*prompt, *rig.tokens["a"], 5, 6]), session_id="s"))
    assert rig.cached["b"] == 44
    rig.loop.check_pools()


def test_answers_to_one_prompt_share_its_window():
    rig = Rig(replace(SMALL, window_slots=200, rows=4))
    messages = [replace(request(f"r{n}", list(range(48)), new=30), group="g", choice=n) for n in range(4)]
    rig.run(*messages)
    rig.check_answers(*messages)
    assert [rig.cached[f"r{n}"] for n in range(4)] == [0, 44, 44, 44]
