"""What is returned besides tokens does not depend on the schedule: over the fake worker, whose scores and states are
hashes of all that a request's slots hold."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve.scheduler import fake_worker as fake
from tests.vlmserve.scheduler.prompts import expected, prompt_of, request
from tests.vlmserve.scheduler.rig import GAPS, Knobs, Rig, knobs, requests
from vlmserve.ipc.messages import InputEmbeds, Pooling, ReturnOptions

ASKED = (3, 11)


def with_returns(draw, message):
    length = len(message.input_ids)
    wants = draw(st.booleans())
    returns = ReturnOptions(
        prompt_logprobs=draw(st.integers(0, 2)) if wants else None,
        logprob_start_len=draw(st.integers(0, length - 1)) if wants else 0,
        token_ids_logprob=draw(st.sampled_from([(), ASKED])),
        hidden_states=draw(st.sampled_from(["none", "last", "all"])),
    )
    if draw(st.booleans()):
        pooling = Pooling(how=draw(st.sampled_from(["last", "mean"])), normalize=False)
        returns = replace(returns, hidden_states="none", pooling=pooling)
    new = 0 if returns.pooling or draw(st.booleans()) else message.sampling_params.max_new_tokens
    return replace(message, returns=returns, sampling_params=replace(message.sampling_params, max_new_tokens=new))


@st.composite
def scored_requests(draw):
    return [with_returns(draw, message) for message in draw(requests())]


def check(rig: Rig, message) -> None:
    prompt, returns, rid = prompt_of(message), message.returns, message.rid
    outputs = rig.outputs[rid]
    tokens = expected(message)
    assert rig.tokens[rid] == tokens
    assert rig.finish[rid].type == "length"
    if returns.prompt_logprobs is not None:
        found, start = outputs[0].prompt_logprobs, returns.logprob_start_len
        assert (found.start, found.token_ids.tolist()) == (start, message.input_ids[start:].tolist())
        assert found.top_ids.shape[1] <= returns.prompt_logprobs
        assert len(found.logprobs) == len(prompt) - start
        for row, position in enumerate(range(start, len(prompt))):
            if not position:
                assert np.isnan(found.logprobs[0])
                continue
            history = prompt[:position]
            assert found.logprobs[row] == np.float32(fake.score(history, message.input_ids[position]))
            assert found.ranks[row] == position
            assert found.top_ids[row].tolist() == [fake.next_token(history)] * returns.prompt_logprobs
            asked = [np.float32(fake.score(history, token)) for token in returns.token_ids_logprob]
            assert found.token_ids_logprobs[row].tolist() == asked
    else:
        assert outputs[0].prompt_logprobs is None
    delta = message.mm_inputs.mrope_position_delta if message.mm_inputs else 0
    histories = [
        prompt + [(("id", token), (len(prompt) + i + delta,) * 3) for i, token in enumerate(tokens[:end])]
        for end in range(max(len(tokens), 1))
    ]
    shown = {"none": [], "last": histories[:1], "all": histories}[returns.hidden_states]
    if returns.pooling is not None:
        ends = range(1, len(prompt) + 1) if returns.pooling.how == "mean" else [len(prompt)]
        [[vector]] = outputs[0].hidden_states
        assert vector == pytest.approx(np.mean([fake.score(prompt[:end], 0) for end in ends]), rel=1e-5)
        return
    hidden = [state for out in outputs if out.hidden_states is not None for state in out.hidden_states[:, 0].tolist()]
    assert hidden == [np.float32(fake.score(history, 0)) for history in shown]
    if returns.token_ids_logprob:
        want = [tuple(np.float32(fake.score(history, token)) for token in ASKED) for history in histories]
        asked = [entry.token_ids_logprobs for out in outputs for entry in out.logprobs or ()]
        assert asked == want[: len(tokens)]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=scored_requests(), knobs=knobs(), gaps=GAPS)
def test_scores_do_not_depend_on_the_schedule(messages, knobs, gaps):
    rig = Rig(knobs)
    rig.play(messages, gaps)
    for message in messages:
        check(rig, message)
    rig.check_nothing_is_left()


def test_retracted_scores_are_asked_for_once():
    """Its KV is computed again where it must be, and what was known of its prompt stays known."""
    rig = Rig(Knobs(pool=64, page=4, chunk=None, rows=6, context=64, conservativeness=0.001))
    messages = [request(f"r{i}", [i] * 6, new=40) for i in range(5)]
    messages = [replace(message, returns=ReturnOptions(prompt_logprobs=1)) for message in messages]
    rig.run(*messages)
    assert rig.loop.stats().retracted_total > 0
    for message in messages:
        check(rig, message)
    asked = sum(len(batch.prompt_logprobs.tokens) for batch in rig.worker.batches if batch.prompt_logprobs)
    assert asked == sum(len(message.input_ids) - 1 for message in messages)


def test_a_mean_is_summed_up_once():
    """No token of it comes from the cache, and none is returned twice."""
    rig = Rig(Knobs(pool=64, page=4, chunk=8, rows=6, context=64, conservativeness=0.001))
    answers = [request(f"r{i}", [i] * 6, new=40) for i in range(5)]
    means = [
        replace(
            request(f"m{i}", [9, i] * 20, new=0), returns=ReturnOptions(pooling=Pooling(how="mean", normalize=False))
        )
        for i in range(5)
    ]
    rig.run(*answers, *means)
    for message in means:
        check(rig, message)
    steps = [batch for batch in rig.worker.batches if len(batch.hidden_tokens)]
    summed = sum(int(batch.hidden_counts.sum()) or len(batch.hidden_tokens) for batch in steps)
    assert summed == sum(len(message.input_ids) for message in means)
    again = replace(means[0], rid="again")
    rig.run(again)
    check(rig, again)
    assert rig.cached["again"] == 0


def test_the_prefix_before_the_first_position_asked_comes_from_the_cache():
    rig = Rig(Knobs(chunk=None))
    ids = [i % 7 for i in range(40)]
    rig.run(request("a", ids))
    late = replace(request("b", ids, new=0), returns=ReturnOptions(prompt_logprobs=0, logprob_start_len=30))
    rig.run(late)
    check(rig, late)
    assert rig.cached["b"] == 28  # position 30 needs the logits of 29


def test_a_request_without_an_answer_takes_no_slot_for_one():
    """It fills the context to the last token, and no step decodes or samples."""
    rig = Rig(Knobs(pool=32, page=4, context=28, chunk=8))
    message = replace(request("a", [1] * 28, new=0), returns=ReturnOptions(prompt_logprobs=0))
    rig.run(message)
    check(rig, message)
    assert rig.loop.stats().generation_tokens_total == 0
    assert sum(len(batch.input_ids) for batch in rig.worker.batches) == 28


def test_embeddings_are_known_by_their_digests():
    rig = Rig(Knobs(chunk=8))
    digests = np.arange(20, dtype=np.uint8)[:, None].repeat(32, axis=1)
    for rid, changed in (("a", None), ("b", None), ("c", 9)):
        own = digests.copy()
        if changed is not None:
            own[changed] = 99
        rows = own[:, :2].astype(np.float32)
        given_rows = InputEmbeds(rows=rows, digests=own)
        rig.run(replace(request(rid, [0] * 20, new=2), input_embeds=given_rows))
        sent = [row for batch in rig.worker.batches for part in batch.input_embeds for row in part.embeds.tolist()]
        assert sent == rows[rig.cached[rid] :].tolist()
        rig.worker.batches.clear()
    assert rig.cached == {"a": 0, "b": 16, "c": 8}


def test_a_prompt_that_is_computed_again_with_other_weights_is_summed_up_and_scored_anew() -> None:
    rig = Rig(Knobs(chunk=8))
    mean = ReturnOptions(pooling=Pooling(how="mean", normalize=False))
    for rid, returns in (("a", mean), ("b", ReturnOptions(prompt_logprobs=0))):
        rig.handle(replace(request(rid, [*range(1, 21)], new=0), returns=returns))
        while not rig.worker.batches:
            rig.step()
        rig.loop.retract_all()
        rig.loop.weights_changed("later", tower=False)
        rig.worker.batches.clear()
        rig.run()
        summed = [int(batch.hidden_counts.sum()) for batch in rig.worker.batches if len(batch.hidden_tokens)]
        scored = [len(batch.prompt_logprobs.tokens) for batch in rig.worker.batches if batch.prompt_logprobs]
        assert (sum(summed), sum(scored)) == ((20, 0) if rid == "a" else (0, 19))
        rig.worker.batches.clear()
