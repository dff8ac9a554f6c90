"""The real loop, scheduler and pools over a fake worker: right answers and balanced pools, whatever the schedule."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vision.fake_backend import ROW_BYTES
from tests.vlmserve.scheduler.fake_grammars import BAD, ENDS, LENGTH, spec
from tests.vlmserve.scheduler.prompts import expected, request
from tests.vlmserve.scheduler.rig import ABORTS, GAPS, Knobs, Rig, knobs, requests
from vision.towers.temporal_patch import temporal_patches
from vlmserve.ipc.messages import AbortReq
from vlmserve_common.errors import EngineError


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=requests(grammars=("3", ENDS, BAD)),
    knobs=knobs(),
    gaps=GAPS,
    aborts=ABORTS,
    finish_every=st.integers(1, 4),
    poisoned=st.sampled_from([0, 1, 2]),
)
def test_answers_do_not_depend_on_the_schedule(messages, knobs, gaps, aborts, finish_every, poisoned):
    """Small pools make retraction and eviction common, encoders lag behind; every answer is as if computed alone, and
    pools balance. A picture that cannot be encoded, not the second time either, fails those who need it only."""
    rig = Rig(knobs)
    poison = next((d for m in messages if m.mm_inputs for item in m.mm_inputs.items for d in item.patch_digests), b"")
    rig.backend.fail[poison] = poisoned
    aborted = rig.play(messages, gaps, aborts, finish_every)
    for message in messages:
        grammar = message.sampling_params.grammar
        bad = grammar is not None and grammar.text == BAD
        want = [] if bad else expected(message)
        got = rig.tokens[message.rid]
        if bad and message.rid in aborted:
            assert got == []
        elif bad and rig.finish[message.rid].status == 400:
            assert got == []
            assert rig.finish[message.rid].param == "response_format"
        elif message.rid in aborted and len(got) < len(want):
            assert got == want[: len(got)]
            reason = rig.finish.get(message.rid)
            assert (reason is None) if aborted[message.rid] else reason.type == "abort"
        elif rig.finish[message.rid].type == "error":
            assert poisoned == 2
            assert any(poison in item.patch_digests for item in message.mm_inputs.items)
            assert "could not be encoded: RuntimeError: poisoned" in rig.finish[message.rid].message
        else:
            assert got == want, message.rid
            over = grammar is not None and grammar.text == ENDS and len(want) == LENGTH
            assert rig.finish[message.rid].type == ("stop" if over else "length")
    rig.check_nothing_is_left()
    assert rig.pool.cache.device.bytes <= knobs.space_rows * ROW_BYTES


def test_grammars_that_take_long_hold_nobody_up():
    rig = Rig()
    for i in range(80):
        rig.handle(request(f"slow{i}", [1] * 6, grammar=spec("3")))
    plain, quick = request("plain", [2] * 6), request("quick", [2] * 6, grammar=spec("5"))
    for message in (plain, quick):
        rig.handle(message)
    rig.step()
    assert rig.grammars.finish()  # the newest
    rig.steps()
    for message in (plain, quick):
        assert rig.tokens[message.rid] == expected(message)
    assert set(rig.finish) == {"plain", "quick"}
    assert rig.loop.wait_handles()
    rig.run()
    assert len(rig.finish) == 82
    assert rig.grammars.held == 0


def test_a_grammar_that_several_have_is_refused_by_the_name_of_each_one_s_field():
    rig = Rig()
    rig.run(*(request(param, [1] * 6, grammar=spec(BAD, param=param)) for param in ("regex", "guided_regex")))
    for param in ("regex", "guided_regex"):
        assert (rig.finish[param].status, rig.finish[param].param) == (400, param)
        assert rig.finish[param].message == f"{param} cannot be compiled"


def test_an_engine_without_grammars_refuses_them():
    rig = Rig(has_grammars=False)
    rig.handle(request("a", [1] * 6, grammar=spec("3")))
    assert (rig.finish["a"].status, rig.finish["a"].param) == (400, "response_format")


def evict_all(rig: Rig) -> None:
    rig.kv.prefix_cache.evict(rig.kv.allocator.size)


def test_a_session_keeps_its_kv_until_it_is_idle_for_too_long():
    rig = Rig(Knobs(chunk=None))
    first = request("a", [1] * 30)
    rig.run(replace(first, session_id="s"))
    evict_all(rig)
    turn = [1] * 30 + rig.tokens["a"] + [2] * 5
    rig.run(replace(request("b", turn), session_id="s"))
    assert rig.cached["b"] == 36, "whole pages of prompt and answer, but for its last token"
    evict_all(rig)
    rig.now += 101.0
    rig.step()
    assert len(rig.scheduler.sessions) == 0
    evict_all(rig)
    rig.run(request("c", turn))
    assert rig.cached["c"] == 0


def test_sessions_give_way_when_slots_are_short():
    rig = Rig(Knobs(chunk=None, pool=96, rows=4, context=90))
    for name in "abc":
        rig.run(replace(request(name, [ord(name)] * 20), session_id=name))
    assert len(rig.scheduler.sessions) == 3
    large = request("large", [9] * 60, new=20)
    rig.run(large)
    rig.check_answers(large)
    assert len(rig.scheduler.sessions) == 0
    rig.loop.check_pools()


def test_chunks_cut_inside_a_picture_and_send_its_rows_once_each():
    rig = Rig(Knobs(chunk=8, page=4))
    rig.run(request("a", [0] * 40, [(3, 30, b"pic")]))
    parts = [part.embeds[:, 1].tolist() for batch in rig.worker.batches for part in batch.mm_embeds]
    assert [row for part in parts for row in part] == list(range(30))
    assert len(parts) > 1
    assert len(rig.backend.batches) == 1


def encoded_request(rid: str, rows: int):
    message = request(rid, [0] * (rows + 2), [(1, rows, rid.encode())])
    items = tuple(
        replace(item, encoded=True, feature=np.full((rows, 2), 7, np.int32)) for item in message.mm_inputs.items
    )
    return replace(message, mm_inputs=replace(message.mm_inputs, items=items))


def test_pictures_that_came_encoded_pass_the_encoder_by_and_are_not_kept():
    rig = Rig(Knobs(chunk=64))
    for rid in "ab":
        rig.handle(encoded_request(rid, 12))
    rig.step()
    assert len(rig.worker.batches[0].req_pool_indices) == 2
    assert [part.embeds.tolist() for part in rig.worker.batches[0].mm_embeds] == [[[7, 7]] * 12] * 2
    rig.run()
    assert rig.backend.batches == []
    assert len(rig.pool.cache.device) == 0


def test_requests_that_wait_for_rows_cost_no_look_at_the_prefix_cache(monkeypatch):
    rig = Rig(Knobs(encoders=1))
    for i in range(50):
        rig.handle(request(f"r{i}", [1] * 20, [(3, 12, b"%d" % i)], new=1))
    started = []
    monkeypatch.setattr(rig.kv, "start", lambda req: started.append(req.rid))
    rig.steps()
    assert started == []
    monkeypatch.undo()
    rig.run()
    assert len(rig.finish) == 50


def test_others_go_on_while_a_picture_is_encoded():
    rig = Rig(Knobs(encoders=1, chunk=8))
    picture, text = request("picture", [1] * 20, [(3, 12, b"slow")]), request("text", [2] * 30)
    rig.handle(picture)
    rig.handle(text)
    rig.steps()
    assert rig.tokens["text"] == expected(text), "in chunks, and to its end"
    assert rig.tokens["picture"] == []
    assert rig.loop.wait_handles(), "there is something to wait for"
    rig.run()
    rig.check_answers(picture)
    assert rig.loop.wait_handles() == []


def test_a_prompt_in_progress_that_waits_for_its_second_picture_lets_others_pass():
    rig = Rig(Knobs(encoders=1, chunk=16, page=4, space_rows=12))  # one at a time
    two = request("two", [1] * 60, [(3, 12, b"one"), (30, 12, b"two")])
    rig.handle(two)
    rig.step()
    rig.backend.finish()
    rig.step()
    assert len(rig.scheduler.waiting_queue.in_progress) == 1
    text = request("text", [2] * 50)
    rig.handle(text)
    rig.steps()
    rig.check_answers(text)
    rig.run()
    rig.check_answers(two)


def rig_without_room() -> tuple[Rig, list[bytes]]:
    """Others hold all room of the encoder, under these keys."""
    rig = Rig(Knobs(space_rows=2, disk=True))
    others = request("others", [1] * 9, [(1, 2, b"others")]).mm_inputs.items[0]
    keys = rig.pool.submit(temporal_patches(others), order=-1)
    while not rig.pool.is_ready(keys[0]):
        if not rig.pool.advance():
            rig.disk.finish_load()
    return rig, keys


def test_nobody_waits_for_the_disk_to_write():
    """Only what is written is under way: the picture comes all the same."""
    rig, keys = rig_without_room()
    picture = request("picture", [1] * 20, [(3, 2, b"pic")])
    rig.handle(picture)
    rig.steps()
    rig.disk.finish_load()
    with pytest.raises(EngineError, match="bytes of embeddings are held"):
        rig.run()
    rig.check_answers(picture)
    assert len(rig.disk.saves) == 2, "nothing was written meanwhile"
    rig.pool.release(keys, order=-1)
    rig.run()


def test_text_before_a_picture_waits_with_it_unless_there_is_much_of_it():
    rig = Rig(Knobs(encoders=1, chunk=None, context=700, pool=800))
    rig.handle(request("short", [1] * 40, [(20, 12, b"pic")]))
    rig.step()
    assert rig.worker.batches == []
    rig.handle(request("long", [2] * 350, [(300, 12, b"other")]))
    rig.step()
    assert [int(n) for n in rig.worker.batches[0].seq_lens] == [300]
    rig.run()


def test_mixed_chunks_decode_and_prefill_in_one_step():
    rig = Rig(Knobs(chunk=8, mixed=True))
    rig.handle(request("short", [1, 2], new=20))
    rig.step()
    rig.handle(request("long", [3] * 30, new=2))
    rig.step()
    assert rig.worker.batches[-1].forward_mode == 3
    assert len(rig.worker.batches[-1].req_pool_indices) == 2


def test_a_step_that_depends_on_the_last_token_is_sampled_as_soon_as_that_has_come():
    """And not only when its result is waited for: the device would have nothing to do meanwhile."""
    rig = Rig(Knobs(depth=2, chunk=None))
    rig.handle(*(request(f"r{at}", [at] * 6, new=12, grammar=spec("3")) for at in range(2)))
    while rig.grammars.finish():
        pass
    rig.steps(4)
    for _ in range(3):
        rig.step()
        assert len(rig.loop.device.waiting) == 2, "a forward pass, and its sampling"
    rig.run()


def test_an_urgent_request_gets_its_place_before_a_long_prompt_has_come_to_its_end():
    """Its victim has tokens in flight: these have to come first, and little else is computed meanwhile."""
    rig = Rig(Knobs(depth=2, rows=3, chunk=8, policy="priority"))
    rig.handle(*(replace(request(f"low{at}", [at] * 4, new=60), priority=5) for at in range(2)))
    rig.steps(4)
    rig.handle(replace(request("long", [7] * 100), priority=5))
    rig.steps(3)
    rig.handle(replace(request("urgent", [8] * 4), priority=-5, client="other"))
    before = len(rig.worker.batches)
    while not rig.tokens["urgent"]:
        rig.step()
    assert len(rig.worker.batches) - before <= 6
    rig.run()


def test_a_leak_is_noticed_when_idle():
    rig = Rig()
    rig.kv.allocator.alloc_extend(0, 4, -1)
    with pytest.raises(EngineError, match="idle, but"):
        rig.step()


def test_an_abort_of_who_waits_most_urgently():
    """Nobody gets on without a picture, and before it is begun with its request is gone."""
    rig, keys = rig_without_room()
    pictures = [request(name, [number] * 20, [(3, 2, name.encode())]) for number, name in enumerate(("one", "two"))]
    for picture in pictures:
        rig.handle(picture)
    while rig.scheduler.due.urgent is None:
        assert rig.step()
    rig.handle(AbortReq(rid="one"))
    while len(rig.finish) < 2:
        assert rig.step() or rig.encode()
    assert rig.tokens["two"] == expected(pictures[1])
    rig.pool.release(keys, order=-1)
    rig.run()


def test_decoding_requests_take_turns_in_as_many_groups_as_a_pipeline_has_stages():
    """Nobody is in a step before the token of his last one is there, and no step waits for another one's tokens."""
    rig = Rig(Knobs(depth=4, stages=3, rows=6))
    messages = [request(f"r{i}", [3 + i, 5], new=12) for i in range(6)]
    rig.handle(*messages)
    scheduler, most = rig.scheduler, 0
    decide = scheduler.get_next_batch_to_run

    def watched(in_flight, **options):
        nonlocal most
        most = max(most, len(in_flight))
        batch = decide(in_flight, **options)
        for part in () if batch is None else batch.decoding:
            assert not any(part.req is other.req for one in in_flight for other in one.reqs)
        return batch

    scheduler.get_next_batch_to_run = watched
    rig.run()
    rig.check_answers(*messages)
    decoding = [len(batch.req_pool_indices) for batch in rig.worker.batches if len(batch.prefix_slots) == 0]
    assert most == 3
    assert all((batch.input_ids >= 0).all() for batch in rig.worker.batches)
    assert set(decoding[3:-3]) == {2}
