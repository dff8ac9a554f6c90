"""The real scheduler and pools over a fake worker: right answers and balanced pools, whatever the schedule."""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vision.fake_backend import ROW_BYTES, FakeBackend, make_pool
from tests.vision.fake_disk import FakeDisk
from tests.vlmserve.scheduler import fake_worker as fake
from tests.vlmserve.scheduler.fake_grammars import BAD, ENDS, LENGTH, FakeGrammars, spec
from tests.vlmserve.scheduler.lazy_queue import LazyQueue
from tests.vlmserve.scheduler.prompts import Foresight, expected, request
from vision.encoder_pool import EncoderPool
from vision.towers.temporal_patch import temporal_patches
from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.device_queue import InlineQueue
from vlmserve.ipc.messages import AbortReq
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.memory.prefix_cache import ChunkCache
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.scheduler.fair_order import FairOrder
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.new_token_ratio import NewTokenRatio
from vlmserve.scheduler.policy import make_policy
from vlmserve.scheduler.rounds import Lane
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.scheduler.sessions import Sessions
from vlmserve_common.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class Knobs:
    pool: int = 256
    page: int = 4
    chunk: int | None = 16
    mixed: bool = False
    radix: bool = True
    policy: str = "fcfs"
    depth: int = 1
    stages: int = 1
    drafts: int = 0
    sessions: int = 4
    host_pages: int = 0
    rows: int = 6
    context: int = 128
    conservativeness: float = 0.3
    encoders: int = 0  # beside the scheduler; 0: inline
    space_rows: int = 1000
    host_rows: int | None = None
    disk: bool = False


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What schedulers that compute together have in common; lane: one's own."""

    backend: FakeBackend
    pool: EncoderPool
    lane: Lane
    order: FairOrder


class Rig:
    def __init__(self, knobs: Knobs, *, has_grammars: bool = True, shared: Shared | None = None) -> None:
        allocator = TokenToKVPoolAllocator(knobs.pool, knobs.page)
        if knobs.host_pages and knobs.radix:
            cache = HiRadixCache(allocator, TokenToKVPoolAllocator(knobs.host_pages * knobs.page, knobs.page))
        else:
            cache = RadixCache(allocator) if knobs.radix else ChunkCache(knobs.page)
        max_req_len = min(knobs.context, knobs.pool - knobs.page)
        req_pool = ReqPoolAllocator(knobs.rows, max_req_len + knobs.page)
        self.kv = KVCacheManager(allocator, cache, req_pool)
        self.worker = fake.FakeWorker(knobs.pool + knobs.page, knobs.rows, max_req_len + knobs.page)
        self.disk = FakeDisk() if knobs.disk else None
        if shared is None:
            self.backend = FakeBackend(knobs.encoders or 1, inline=not knobs.encoders)
            self.pool = make_pool(self.backend, space_rows=knobs.space_rows, host_rows=knobs.host_rows, disk=self.disk)
        else:
            self.backend, self.pool = shared.backend, shared.pool
        queue = LazyQueue(knobs.depth) if knobs.depth > 1 else InlineQueue()
        self.now = 0.0
        self.messages = {}
        self.tokens = defaultdict(list)
        self.finish = {}
        self.cached = {}
        self.grammars = FakeGrammars()
        self.scheduler = Scheduler(
            EngineArgs(
                model="none",
                max_running_requests=knobs.rows,
                max_prefill_tokens=64,
                chunked_prefill_size=knobs.chunk or -1,
                enable_mixed_chunk=knobs.mixed,
                check_pools_when_idle=True,
                page_size=knobs.page,
                schedule_policy=knobs.policy,
                pp_size=knobs.stages,
            ),
            max_req_len=max_req_len,
            eos_token_ids=frozenset({fake.VOCAB + 1}),
            kv=self.kv,
            worker=self.worker if shared is None else shared.lane.worker,
            encoder=self.pool,
            device=queue if shared is None else shared.lane,
            policy=make_policy(knobs.policy, match=self.kv.matched_len, path=self.kv.matched_path),
            new_token_ratio=NewTokenRatio(knobs.conservativeness),
            media_keys=MediaKeyTable(),
            sessions=Sessions(cache, max_sessions=knobs.sessions, timeout_s=100, clock=lambda: self.now),
            grammars=self.grammars if has_grammars else None,
            send=self.take,
            drafter=Foresight(self.messages, knobs.drafts) if knobs.drafts else None,
            encoder_order=None if shared is None else shared.order,
        )
        handle = self.scheduler.handle

        def remember(message, **others):
            self.messages[message.rid] = message
            handle(message, **others)

        self.scheduler.handle = remember

    def take(self, message) -> None:
        for out in message.outputs:
            assert out.rid not in self.finish, "an output after the last"
            assert out.first == (out.rid not in self.cached)
            self.cached[out.rid] = out.cached_tokens
            self.tokens[out.rid] += out.token_ids
            if out.finish_reason is not None:
                self.finish[out.rid] = out.finish_reason

    def encode(self) -> bool:
        """Let each encoder beside the scheduler finish a batch, the disk all it has to do, and one grammar be compiled;
        whether one did."""
        busy = [number for number, queue in self.backend.queues.items() if queue]
        for number in busy:
            self.backend.finish(number)
        on_disk = self.disk is not None and bool(self.disk.loads or self.disk.saves)
        if on_disk:
            self.disk.finish_all()
        return self.grammars.finish() or bool(busy) or on_disk

    def step(self) -> bool:
        return self.scheduler.step()

    def run(self, limit: int = 5000) -> None:
        while self.step() or self.encode():
            limit -= 1
            assert limit, "the scheduler does not come to an end"
        assert self.scheduler.is_idle()


@st.composite
def requests(draw, grammars=()):
    count = draw(st.integers(1, 10))
    stems = [draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)) for _ in range(2)]
    found = []
    for i in range(count):
        ids = draw(st.sampled_from(stems))[: draw(st.integers(1, 40))] + draw(st.lists(st.integers(0, 3), max_size=12))
        media = []
        if len(ids) > 6 and draw(st.booleans()):
            start = draw(st.integers(0, len(ids) - 5))
            media = [(start, draw(st.integers(1, 2)), draw(st.sampled_from([b"aa", b"bb"])))]
            rest = len(ids) - start - 2
            if draw(st.booleans()):
                patches = draw(st.lists(st.sampled_from([b"aa", b"bb", b"cc", b"dd"]), min_size=1, max_size=rest))
                each = draw(st.integers(1, rest // len(patches)))
                media.append((start + 2, len(patches) * each, b"-".join(patches)))
        grammar = draw(st.sampled_from([None] * len(grammars) + [None, *grammars]))
        forms = {"grammar": spec(grammar)} if grammar else {}
        found.append(request(f"r{i}", ids, media, new=draw(st.integers(1, 20)), **forms))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=requests(grammars=("3", ENDS, BAD)),
    page=st.sampled_from([1, 4, 16]),
    pages=st.integers(6, 40),
    chunk=st.sampled_from([None, 5, 16, 64]),
    mixed=st.booleans(),
    radix=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority"]),
    depth=st.sampled_from([1, 2, 2, 3]),
    stages=st.sampled_from([1, 1, 2, 3]),
    drafts=st.sampled_from([0, 0, 1, 5]),
    host_pages=st.sampled_from([0, 4, 40]),
    rows=st.integers(1, 6),
    conservativeness=st.sampled_from([0.0, 1.0]),
    gaps=st.lists(st.integers(0, 4), min_size=10, max_size=10),
    aborts=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 20), st.booleans()), max_size=3, unique_by=lambda abort: abort[0]
    ),
    encoders=st.integers(0, 2),
    space=st.sampled_from([0, 3, 10, 1000]),
    host=st.sampled_from([None, 0, 5, 1000]),
    disk=st.booleans(),
    finish_every=st.integers(1, 4),
    poisoned=st.sampled_from([0, 1, 2]),
)
def test_answers_do_not_depend_on_the_schedule(
    messages,
    page,
    pages,
    chunk,
    mixed,
    radix,
    policy,
    depth,
    stages,
    drafts,
    host_pages,
    rows,
    conservativeness,
    gaps,
    aborts,
    encoders,
    space,
    host,
    disk,
    finish_every,
    poisoned,
):
    """Small pools make retraction and eviction common, encoders lag behind; every answer is as if computed alone, and
    pools balance. A picture that cannot be encoded, not the second time either, fails those who need it only."""
    pool = max(pages * page, 96 // page * page)
    rig = Rig(
        Knobs(
            pool=pool,
            page=page,
            chunk=chunk,
            mixed=mixed,
            radix=radix,
            policy=policy,
            depth=depth,
            stages=stages,
            drafts=drafts,
            host_pages=host_pages,
            rows=rows,
            conservativeness=conservativeness,
            encoders=encoders,
            space_rows=space,
            host_rows=host,
            disk=disk,
        )
    )
    poison = next((d for m in messages if m.mm_inputs for item in m.mm_inputs.items for d in item.patch_digests), b"")
    rig.backend.fail[poison] = poisoned
    steps, aborted = 0, {}
    for i, message in enumerate(messages):
        rig.scheduler.handle(message)
        for _ in range(gaps[i]):
            rig.scheduler.step()
            steps += 1
            if steps % finish_every == 0:
                rig.encode()
            for which, when, finished in aborts:
                if when == steps and which <= i and f"r{which}" not in rig.finish:
                    aborted[f"r{which}"] = finished
                    rig.scheduler.handle(AbortReq(rid=f"r{which}", finished=finished))
    rig.run()
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
    assert rig.grammars.held == 0
    stats = rig.scheduler.stats()
    assert stats.kv_free_tokens + stats.kv_cached_tokens == pool
    assert stats.req_pool_free == rows
    rig.scheduler.flush_cache()
    assert rig.kv.allocator.available_size() == pool
    while rig.encode():  # what nobody waits for any more
        rig.scheduler.step()
    assert rig.pool.stats().queued == rig.pool.stats().under_way == 0
    assert rig.pool.cache.device.stats().held_bytes == 0
    assert rig.pool.cache.device.bytes <= space * ROW_BYTES


def test_a_full_cache_retracts_and_the_answers_stay():
    rig = Rig(Knobs(pool=64, page=4, chunk=None, rows=6, context=64, conservativeness=0.0))
    messages = [request(f"r{i}", [i] * 6, new=40) for i in range(5)]
    for message in messages:
        rig.scheduler.handle(message)
    rig.run()
    assert rig.scheduler.stats().retracted_total > 0
    for message in messages:
        assert rig.tokens[message.rid] == expected(message)


def test_grammars_that_take_long_hold_nobody_up():
    rig = Rig(Knobs())
    for i in range(80):
        rig.scheduler.handle(request(f"slow{i}", [1] * 6, grammar=spec("3")))
    plain, quick = request("plain", [2] * 6), request("quick", [2] * 6, grammar=spec("5"))
    for message in (plain, quick):
        rig.scheduler.handle(message)
    rig.step()
    assert rig.grammars.finish()  # the newest
    while rig.step():
        pass
    for message in (plain, quick):
        assert rig.tokens[message.rid] == expected(message)
    assert set(rig.finish) == {"plain", "quick"}
    assert rig.scheduler.wait_handles()
    rig.run()
    assert len(rig.finish) == 82
    assert rig.grammars.held == 0


def test_a_grammar_that_several_have_is_refused_by_the_name_of_each_one_s_field():
    rig = Rig(Knobs())
    for param in ("regex", "guided_regex"):
        rig.scheduler.handle(request(param, [1] * 6, grammar=spec(BAD, param=param)))
    rig.run()
    for param in ("regex", "guided_regex"):
        assert (rig.finish[param].status, rig.finish[param].param) == (400, param)
        assert rig.finish[param].message == f"{param} cannot be compiled"


def test_an_engine_without_grammars_refuses_them():
    rig = Rig(Knobs(), has_grammars=False)
    rig.scheduler.handle(request("a", [1] * 6, grammar=spec("3")))
    assert (rig.finish["a"].status, rig.finish["a"].param) == (400, "response_format")


def evict_all(rig: Rig) -> None:
    rig.kv.prefix_cache.evict(rig.kv.allocator.size)


def test_a_session_keeps_its_kv_until_it_is_idle_for_too_long():
    rig = Rig(Knobs(chunk=None))
    first = request("a", [1] * 30)
    rig.scheduler.handle(replace(first, session_id="s"))
    rig.run()
    evict_all(rig)
    turn = [1] * 30 + rig.tokens["a"] + [2] * 5
    rig.scheduler.handle(replace(request("b", turn), session_id="s"))
    rig.run()
    assert rig.cached["b"] == 36, "whole pages of prompt and answer, but for its last token"
    evict_all(rig)
    rig.now = 101.0
    rig.step()
    assert len(rig.scheduler.sessions) == 0
    evict_all(rig)
    rig.scheduler.handle(request("c", turn))
    rig.run()
    assert rig.cached["c"] == 0


def test_sessions_give_way_when_slots_are_short():
    rig = Rig(Knobs(chunk=None, pool=96, rows=4, context=90))
    for name in "abc":
        rig.scheduler.handle(replace(request(name, [ord(name)] * 20), session_id=name))
        rig.run()
    assert len(rig.scheduler.sessions) == 3
    large = request("large", [9] * 60, new=20)
    rig.scheduler.handle(large)
    rig.run()
    assert rig.tokens["large"] == expected(large)
    assert len(rig.scheduler.sessions) == 0
    rig.scheduler.check_pools()


def test_pictures_that_differ_share_nothing_from_there_on():
    rig = Rig(Knobs(chunk=None))
    first = request("a", list(range(8)) + [0] * 16, [(8, 8, b"red")])
    rig.scheduler.handle(first)
    rig.run()
    same = request("b", list(range(8)) + [0] * 16, [(8, 8, b"red")])
    other = request("c", list(range(8)) + [0] * 16, [(8, 8, b"blue")])
    for message in (same, other):
        rig.scheduler.handle(message)
        rig.run()
        assert rig.tokens[message.rid] == expected(message)
    assert rig.cached == {"a": 0, "b": 20, "c": 8}


def test_chunks_cut_inside_a_picture_and_send_its_rows_once_each():
    rig = Rig(Knobs(chunk=8, page=4))
    rig.scheduler.handle(request("a", [0] * 40, [(3, 30, b"pic")]))
    rig.run()
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
        rig.scheduler.handle(encoded_request(rid, 12))
    rig.scheduler.step()
    assert len(rig.worker.batches[0].req_pool_indices) == 2
    assert [part.embeds.tolist() for part in rig.worker.batches[0].mm_embeds] == [[[7, 7]] * 12] * 2
    rig.run()
    assert rig.backend.batches == []
    assert len(rig.pool.cache.device) == 0


def test_requests_that_wait_for_rows_cost_no_look_at_the_prefix_cache(monkeypatch):
    rig = Rig(Knobs(encoders=1))
    for i in range(50):
        rig.scheduler.handle(request(f"r{i}", [1] * 20, [(3, 12, b"%d" % i)], new=1))
    started = []
    monkeypatch.setattr(rig.kv, "start", lambda req: started.append(req.rid))
    while rig.scheduler.step():
        pass
    assert started == []
    monkeypatch.undo()
    rig.run()
    assert len(rig.finish) == 50


def test_a_hundred_equal_requests_encode_once():
    rig = Rig(Knobs(encoders=2, radix=False))
    messages = [request(f"r{i}", [1] * 20, [(3, 12, b"same")], new=1) for i in range(100)]
    for message in messages:
        rig.scheduler.handle(message)
    rig.run()
    assert rig.backend.encoded() == [messages[0].mm_inputs.items[0].patch_digests[0]]
    assert all(rig.tokens[message.rid] == expected(message) for message in messages)
    assert rig.pool.stats().coalesced == 99


def test_others_go_on_while_a_picture_is_encoded():
    rig = Rig(Knobs(encoders=1, chunk=8))
    picture, text = request("picture", [1] * 20, [(3, 12, b"slow")]), request("text", [2] * 30)
    rig.scheduler.handle(picture)
    rig.scheduler.handle(text)
    while rig.scheduler.step():
        pass
    assert rig.tokens["text"] == expected(text), "in chunks, and to its end"
    assert rig.tokens["picture"] == []
    assert rig.scheduler.wait_handles(), "there is something to wait for"
    rig.run()
    assert rig.tokens["picture"] == expected(picture)
    assert rig.scheduler.wait_handles() == []


def test_a_prompt_in_progress_that_waits_for_its_second_picture_lets_others_pass():
    rig = Rig(Knobs(encoders=1, chunk=16, page=4))
    two = request("two", [1] * 60, [(3, 12, b"one"), (30, 12, b"two")])
    rig.scheduler.handle(two)
    rig.scheduler.step()
    rig.backend.finish()  # both go in one batch: start anew with one at a time
    rig.run()
    rig.scheduler.flush_cache()
    rig = Rig(Knobs(encoders=1, chunk=16, page=4, space_rows=12))
    rig.scheduler.handle(two)
    rig.scheduler.step()
    rig.backend.finish()
    rig.scheduler.step()
    assert len(rig.scheduler.waiting_queue.in_progress) == 1
    text = request("text", [2] * 50)
    rig.scheduler.handle(text)
    while rig.scheduler.step():
        pass
    assert rig.tokens["text"] == expected(text)
    rig.run()
    assert rig.tokens["two"] == expected(two)


def test_a_clip_larger_than_the_space_is_encoded_bit_by_bit():
    rig = Rig(Knobs(chunk=64, space_rows=8, context=128))
    clip = request("clip", [1] * 60, [(3, 40, b"-".join(bytes([97 + i]) * 2 for i in range(10)))])
    rig.scheduler.handle(clip)
    most = 0
    while rig.scheduler.step():
        most = max(most, rig.pool.cache.device.stats().held_bytes)
    assert rig.tokens["clip"] == expected(clip)
    assert most <= 8 * ROW_BYTES
    assert len(rig.backend.encoded()) == 10


def test_a_picture_larger_than_the_space_goes_alone():
    rig = Rig(Knobs(chunk=64, space_rows=8))
    messages = [request("large", [1] * 40, [(3, 30, b"large")]), request("small", [2] * 9, [(1, 4, b"small")])]
    for message in messages:
        rig.scheduler.handle(message)
    rig.run()
    assert all(rig.tokens[message.rid] == expected(message) for message in messages)


def test_a_cached_prefix_needs_no_rows():
    rig = Rig(Knobs(page=1, space_rows=0))
    first = request("first", [1] * 30, [(3, 12, b"seen")])
    rig.scheduler.handle(first)
    rig.run()
    again = request("again", [1] * 30 + [2], [(3, 12, b"seen")])
    rig.scheduler.handle(again)
    rig.run()
    assert rig.tokens["again"] == expected(again)
    assert len(rig.backend.batches) == 1


def test_nobody_waits_for_the_disk_to_write():
    """Others hold all room, and only what is written is under way: the picture comes all the same."""
    rig = Rig(Knobs(space_rows=2, disk=True))
    others = request("others", [1] * 9, [(1, 2, b"others")]).mm_inputs.items[0]
    keys = rig.pool.submit(temporal_patches(others), order=-1)
    while not rig.pool.is_ready(keys[0]):
        rig.pool.advance()
        rig.disk.finish_load() if rig.disk.loads else None
    picture = request("picture", [1] * 20, [(3, 2, b"pic")])
    rig.scheduler.handle(picture)
    while rig.scheduler.step():
        pass
    rig.disk.finish_load()
    with pytest.raises(EngineError, match="bytes of embeddings are held"):
        rig.run()
    assert rig.tokens["picture"] == expected(picture)
    assert len(rig.disk.saves) == 2, "nothing was written meanwhile"
    rig.pool.release(keys, order=-1)
    rig.run()


def test_text_before_a_picture_waits_with_it_unless_there_is_much_of_it():
    rig = Rig(Knobs(encoders=1, chunk=None, context=700, pool=800))
    rig.scheduler.handle(request("short", [1] * 40, [(20, 12, b"pic")]))
    rig.scheduler.step()
    assert rig.worker.batches == []
    rig.scheduler.handle(request("long", [2] * 350, [(300, 12, b"other")]))
    rig.scheduler.step()
    assert [int(n) for n in rig.worker.batches[0].seq_lens] == [300]
    rig.run()


def test_prompt_and_decode_steps_alternate_so_nobody_waits_long():
    rig = Rig(Knobs(chunk=8, rows=4))
    rig.scheduler.handle(request("short", [1, 2], new=20))
    rig.scheduler.step()
    rig.scheduler.handle(request("long", [3] * 80, new=2))
    for _ in range(10):
        rig.scheduler.step()
    modes = [batch.forward_mode for batch in rig.worker.batches[1:]]
    assert modes[:8] == [2, 1] * 4, modes


def test_mixed_chunks_decode_and_prefill_in_one_step():
    rig = Rig(Knobs(chunk=8, mixed=True))
    rig.scheduler.handle(request("short", [1, 2], new=20))
    rig.scheduler.step()
    rig.scheduler.handle(request("long", [3] * 30, new=2))
    rig.scheduler.step()
    assert rig.worker.batches[-1].forward_mode == 3
    assert len(rig.worker.batches[-1].req_pool_indices) == 2


def test_a_failing_step_ends_its_own_requests_only():
    rig = Rig(Knobs(chunk=None, rows=2))
    messages = [request(f"r{i}", [i] * 9) for i in range(4)]
    for message in messages:
        rig.scheduler.handle(message)
    rig.worker.fail_at = 3
    rig.run()
    failed = [rid for rid, reason in rig.finish.items() if reason.type == "error"]
    assert failed == ["r0", "r1"]
    for message in messages[2:]:
        assert rig.tokens[message.rid] == expected(message)
    rig.scheduler.check_pools()


def test_a_leak_is_noticed_when_idle():
    rig = Rig(Knobs())
    rig.kv.allocator.alloc_extend(0, 4, -1)
    with pytest.raises(EngineError, match="idle, but"):
        rig.scheduler.step()


def test_stop_tokens_end_an_answer():
    message = request("a", [1, 2, 3], new=10)
    stop = expected(message)[3]
    cut = expected(message).index(stop) + 1
    rig = Rig(Knobs())
    rig.scheduler.handle(request("a", [1, 2, 3], new=10, stop_token_ids=(stop,)))
    rig.run()
    assert rig.tokens["a"] == expected(message)[:cut]
    assert rig.finish["a"].matched == stop


def test_an_abort_of_who_waits_most_urgently():
    """Nobody gets on without a picture, and before it is begun with its request is gone."""
    rig = Rig(Knobs(space_rows=2, disk=True))
    others = request("others", [1] * 9, [(1, 2, b"others")]).mm_inputs.items[0]
    keys = rig.pool.submit(temporal_patches(others), order=-1)
    while not rig.pool.is_ready(keys[0]):
        rig.pool.advance()
        rig.disk.finish_load() if rig.disk.loads else rig.backend.work(1.0)
    pictures = [request(name, [number] * 20, [(3, 2, name.encode())]) for number, name in enumerate(("one", "two"))]
    for picture in pictures:
        rig.scheduler.handle(picture)
    while rig.scheduler.urgent is None:
        assert rig.scheduler.step()
    rig.scheduler.handle(AbortReq(rid="one"))
    while len(rig.finish) < 2:
        assert rig.step() or rig.encode()
    assert rig.tokens["two"] == expected(pictures[1])
    rig.pool.release(keys, order=-1)
    rig.run()
