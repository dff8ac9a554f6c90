"""An engine without a model: the real loop, schedulers, pools and caches over fake workers and encoders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from processors.inputs import MultimodalDataItem
from tests.vision.fake_backend import FakeBackend, make_pool
from tests.vision.fake_disk import FakeDisk
from tests.vlmserve.scheduler import fake_worker as fake
from tests.vlmserve.scheduler.fake_grammars import FakeGrammars, spec
from tests.vlmserve.scheduler.lazy_queue import LazyQueue
from tests.vlmserve.scheduler.prompts import Foresight, expected, request
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.loop import EventLoop, GroupPlacement
from vlmserve.engine.step import OneGroup
from vlmserve.executor.device_queue import DeviceQueue
from vlmserve.ipc.messages import AbortReq, EncodeOutput, EncodeReqInput, FinishReason, TokenOutput
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.recurrent_states import RecurrentStates
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.memory.window_pool import WindowPool
from vlmserve.routing.replicas import ReplicaRouter
from vlmserve.scheduler.drafts import Drafter, WorkerDrafter
from vlmserve.scheduler.guessing import Guesser
from vlmserve.scheduler.handover import HandedPrompts, Receivers, RemotePrompts, Sender
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_life import ReqStatus
from vlmserve.scheduler.req_media import FairOrder
from vlmserve.scheduler.request_states import RequestStates
from vlmserve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """drafts: tokens guessed at a time; guesses_there: by the worker. encoders: beside the loop; 0: in its
    process. warmup_patches: of media encoded ahead of time. snapshots: states
    for these, of a model with recurrent layers. window: of layers that have one; window_slots: their own slots."""

    pool: int = 256
    page: int = 4
    chunk: int | None = 16
    prefill: int = 64
    mixed: bool = False
    radix: bool = True
    policy: str = "fcfs"
    depth: int = 1
    stages: int = 1
    drafts: int = 0
    guesses_there: bool = False
    sessions: int = 4
    host_pages: int = 0
    rows: int = 6
    context: int = 128
    conservativeness: float = 0.3
    snapshots: int | None = None
    window: int = 0
    window_slots: int = 0
    encoders: int = 0
    max_patches: int = 64
    space_rows: int = 1000
    host_rows: int | None = None
    disk: bool = False
    warmup_patches: int = 16
    slowdown: float | None = None
    ceiling: float | None = None


class FakeGroups:
    """A worker of several groups, each of which has a fake worker. forwards: which of them had a step, one by one."""

    def __init__(self, workers: Sequence[fake.FakeWorker]) -> None:
        self.workers = workers
        self.forwards: list[tuple[bool, ...]] = []

    def forward(self, steps):
        self.forwards.append(tuple(step is not None for step in steps))
        pairs = zip(self.workers, steps, strict=True)
        return [None if step is None else worker.forward(step) for worker, step in pairs]

    def sample(self, steps):
        pairs = zip(self.workers, steps, strict=True)
        return [None if step is None else worker.sample(*step) for worker, step in pairs]


class Rig:
    """tokens, finish, cached: of each request, by its id; outputs: all that was sent of it. warmed: answers to media
    encoded ahead of time. now: of the clock. Of several groups, `scheduler`, `kv` and `worker` are the first one's."""

    def __init__(
        self,
        knobs: Knobs = Knobs(),
        *,
        groups: int = 1,
        has_grammars: bool = True,
        sender: Sender | None = None,
        receivers: Receivers | None = None,
    ) -> None:
        self.knobs, self.now = knobs, 0.0
        self.sender, self.receivers = sender, receivers
        self.messages: dict = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.outputs: dict[str, list[TokenOutput]] = defaultdict(list)
        self.warmed: dict[str, EncodeOutput] = {}
        self.disk = FakeDisk() if knobs.disk else None
        self.backend = self.make_backend()
        rows = {"space_rows": knobs.space_rows, "host_rows": knobs.host_rows}
        self.pool = make_pool(self.backend, max_patches=knobs.max_patches, disk=self.disk, **rows)
        self.grammars = FakeGrammars()
        self.router = ReplicaRouter(groups, method="shortest_queue")
        placement = GroupPlacement(self.router) if groups > 1 else None
        send = self.take if placement is None else placement.noting(self.take)
        if sender is not None:
            send = sender.noting(send)
        order = FairOrder()
        self.workers: list[fake.FakeWorker] = []
        schedulers = [self._scheduler(send, order, has_grammars) for _ in range(groups)]
        self.scheduler, self.kv, self.worker = schedulers[0], schedulers[0].kv, self.workers[0]
        self.groups = FakeGroups(self.workers)
        self.loop = EventLoop(
            schedulers,
            worker=OneGroup(self.make_worker()) if groups == 1 else self.groups,
            device=self.make_device(),
            encoder=self.pool,
            send=send,
            max_patches=knobs.warmup_patches,
            placement=placement,
            peers=sender,
        )

    def make_backend(self) -> FakeBackend:
        return FakeBackend(self.knobs.encoders or 1, inline=not self.knobs.encoders)

    def make_worker(self):
        return self.worker

    def make_device(self):
        return LazyQueue(self.knobs.depth) if self.knobs.depth > 1 else DeviceQueue()

    def _states(self) -> RequestStates | None:
        page, count = self.knobs.page, self.knobs.snapshots
        if count is None:
            return None
        pool = RecurrentStates(self.knobs.rows + count, num_slots=self.knobs.pool + page, page_size=page)
        return RequestStates(pool, unit=2 * page, interval=5 * page, snapshots=self.knobs.radix and count > 0)

    def _scheduler(self, send, order: FairOrder, has_grammars: bool) -> Scheduler:
        knobs = self.knobs
        allocator = TokenToKVPoolAllocator(knobs.pool, knobs.page)
        if knobs.host_pages and knobs.radix:
            cache = HiRadixCache(allocator, TokenToKVPoolAllocator(knobs.host_pages * knobs.page, knobs.page))
        else:
            cache = RadixCache(allocator, shares=knobs.radix)
        max_req_len = min(knobs.context, knobs.pool - knobs.page)
        rows = ReqPoolAllocator(knobs.rows, max_req_len + knobs.page)
        num_slots = knobs.pool + knobs.page
        windows = None
        if knobs.window:
            windows = WindowPool(knobs.window_slots, window=knobs.window, num_slots=num_slots, page_size=knobs.page)
        kv = KVCacheManager(allocator, cache, rows, states=self._states(), windows=windows)
        self.workers.append(fake.FakeWorker(num_slots, knobs.rows, max_req_len + knobs.page, window=knobs.window))
        return Scheduler(
            EngineArgs(
                model="none",
                max_running_requests=knobs.rows,
                max_prefill_tokens=knobs.prefill,
                chunked_prefill_size=knobs.chunk or -1,
                enable_mixed_chunk=knobs.mixed,
                check_pools_when_idle=True,
                page_size=knobs.page,
                schedule_policy=knobs.policy,
                schedule_conservativeness=knobs.conservativeness,
                max_sessions=knobs.sessions,
                max_decode_slowdown=knobs.slowdown,
                max_time_between_tokens_s=knobs.ceiling,
                session_timeout_s=100,
                pp_size=knobs.stages,
            ),
            max_req_len=max_req_len,
            eos_token_ids=frozenset({fake.VOCAB + 1}),
            kv=kv,
            encoder=self.pool,
            media_keys=MediaKeyTable(),
            grammars=self.grammars if has_grammars else None,
            send=send,
            guesser=Guesser(self._drafter(), most=knobs.drafts, adapts=False),
            encoder_order=order,
            handed=None if self.sender is None else HandedPrompts(kv, self.sender, group=0),
            remote=None if self.receivers is None else RemotePrompts(kv, self.receivers, group=0),
            clock=lambda: self.now,
        )

    def _drafter(self) -> Drafter | None:
        count = self.knobs.drafts
        if self.knobs.guesses_there:
            return WorkerDrafter(count)
        return Foresight(self.messages, count) if count else None

    def take(self, message) -> None:
        if isinstance(message, EncodeOutput):
            assert message.rid not in self.warmed
            self.warmed[message.rid] = message
            return
        for out in message.outputs:
            assert out.rid not in self.finish, "an output after the last"
            assert out.first == (out.rid not in self.outputs)
            assert out.prompt_logprobs is None or out.first
            self.outputs[out.rid].append(out)
            self.cached[out.rid] = out.cached_tokens
            self.tokens[out.rid] += out.token_ids
            if out.finish_reason is not None:
                self.finish[out.rid] = out.finish_reason

    def handle(self, *messages) -> None:
        """Hand messages to the loop."""
        for message in messages:
            if not isinstance(message, AbortReq):
                self.messages[message.rid] = message
            self.loop.handle(message)

    def warm_up(self, rid: str, *items: MultimodalDataItem) -> None:
        """Ask for media to be encoded ahead of time."""
        self.loop.handle(EncodeReqInput(rid=rid, items=items))

    def step(self) -> bool:
        """Do one turn of the loop, which takes a second of the clock."""
        self.now += 1.0
        busy = self.loop.step()
        self.check()
        return busy

    def steps(self, count: int | None = None) -> None:
        """Do so many turns; None: until there is nothing to do without the encoders."""
        while (count is None or count > 0) and (self.step() or count is not None):
            count = None if count is None else count - 1

    def encode(self) -> bool:
        """Let each encoder beside the loop finish a batch, the disk all it has to do, and one grammar be compiled.
        Returns whether anything was done."""
        busy = [number for number, queue in self.backend.queues.items() if queue]
        for number in busy:
            self.backend.finish(number)
        on_disk = self.disk is not None and bool(self.disk.loads or self.disk.saves)
        if on_disk:
            self.disk.finish_all()
        return self.grammars.finish() or bool(busy) or on_disk

    def run(self, *messages, limit: int = 5000) -> None:
        """Take these messages, and go on until everything is answered."""
        self.handle(*messages)
        while self.step() or self.encode():
            limit -= 1
            assert limit, "the loop does not come to an end"
        assert self.loop.is_idle()
        assert self.router.num_in_flight == 0

    def play(self, messages, gaps: Sequence[int], aborts=(), finish_every: int = 0) -> dict[str, bool]:
        """Run messages that come so many turns apart to their end. Returns which requests were aborted on the way, and
        whether as finished.

        aborts: (which message, at which turn, finished). finish_every: turns between two times that encoders finish.
        """
        turns, aborted = 0, {}
        for at, (message, gap) in enumerate(zip(messages, gaps, strict=False)):
            self.handle(message)
            for _ in range(gap):
                self.step()
                turns += 1
                if finish_every and turns % finish_every == 0:
                    self.encode()
                for which, when, finished in aborts:
                    if when == turns and which <= at and f"r{which}" not in self.finish:
                        aborted[f"r{which}"] = finished
                        self.handle(AbortReq(rid=f"r{which}", finished=finished))
        self.run()
        return aborted

    def check(self) -> None:
        """Check what holds after every turn: lengths, lists, and an owner for every slot and place."""
        page, total = self.knobs.page, self.knobs.pool
        for scheduler in self.loop.schedulers:
            kv, queue, reqs = scheduler.kv, scheduler.waiting_queue, list(scheduler._reqs.values())
            remote = scheduler.remote
            ended = [] if remote is None else [req for req in remote._reqs.values() if req.is_finished]
            queue.check()
            in_progress, running, queued = set(queue.in_progress), set(scheduler.running_batch.reqs), set(queue)
            for req in reqs:
                req.check()
                assert (req in queued) == req.status.is_queued, req.rid
                assert (req in in_progress) == (req.status is ReqStatus.PREFILLING), req.rid
                assert (req in running) == (req.status is ReqStatus.DECODING), req.rid
                assert (req.req_pool_idx is None) == req.status.is_queued, req.rid
            handed = sum(req.status is ReqStatus.TRANSFERRING for req in reqs)
            assert len(queued) + len(in_progress) + len(running) + handed == len(reqs)
            reqs += ended  # they have their slots until nothing is written to these
            places = sum(req.req_pool_idx is not None for req in reqs)
            assert kv.req_pool.available_size() + places == self.knobs.rows
            assert kv.states is None or kv.states.held == places
            own = sum(-(-req.kv_allocated_len // page) * page - req.protected_len for req in reqs)
            cached = kv.prefix_cache.evictable_size() + kv.prefix_cache.protected_size()
            assert kv.allocator.available_size() + cached + own == total
            if kv.windows is not None:
                self.check_windows(scheduler, [req for req in reqs if req.req_pool_idx is not None])

    def check_windows(self, scheduler: Scheduler, reqs: Sequence[Req]) -> None:
        """Check that the pages of layers with windows are held by those requests and sessions alone that need them."""
        kv, page, held = scheduler.kv, self.knobs.page, defaultdict(int)
        windows = kv.windows
        for turn in scheduler.sessions._sessions.values():
            for number in turn.pages.tolist():
                held[number] += 1
        for req in reqs:
            last = max(0, req.kv_committed_len // page * page + 1 - windows.window)
            assert req.window_start == last // page * page, req.rid
            for number in kv._pages(req, req.window_start, req.kv_allocated_len).tolist():
                held[number] += 1
        assert windows.size - windows.available_size() == len(held) * page
        assert {number: int(windows._holders[number]) for number in held} == held
        places = windows._place[windows._place > 0].tolist()
        assert sorted([*places, *windows._free]) == list(range(1, windows.size // page + 1))

    def check_answers(self, *messages) -> None:
        """Check that each message has the answer that it would have alone."""
        for message in messages:
            assert self.tokens[message.rid] == expected(message), message.rid

    def check_nothing_is_left(self) -> None:
        """Check that an idle engine holds nothing but what it caches, and after a flush nothing at all."""
        assert self.grammars.held == 0
        stats = self.loop.stats()
        for one in stats.replicas or (stats,):
            assert one.kv_free_tokens + one.kv_cached_tokens == self.knobs.pool
            assert one.req_pool_free == self.knobs.rows
        self.loop.flush_cache()
        for kv in (one.kv for one in self.loop.schedulers):
            assert kv.allocator.available_size() == self.knobs.pool
            assert kv.states is None or not kv.states.pool.resumable(np.arange(self.knobs.pool))
            assert kv.windows is None or len(kv.windows._free) * self.knobs.page == kv.windows.size
        while self.encode():  # what nobody waits for any more
            self.step()
        assert self.pool.stats().queued == self.pool.stats().under_way == 0
        assert self.pool.cache.device.stats().held_bytes == 0


GAPS = st.lists(st.integers(0, 4), min_size=10, max_size=10)
ABORTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 20), st.booleans()), max_size=3, unique_by=lambda abort: abort[0]
)


def window_pages(page: int, window: int) -> int:
    """Return the pages that one request may have to hold: a whole prompt, or its window and what is in flight."""
    return (128 + window) // page + 4


@st.composite
def knobs(draw, *, windows: bool = False) -> Knobs:
    """Any engine. Pools are small, so requests are retracted and prefixes evicted often, and encoders lag behind.
    windows: of a model that has layers with windows."""
    page = draw(st.sampled_from([1, 4, 16]))
    snapshots = None if windows else draw(st.sampled_from([None, None, 0, 3, 20]))
    only_without_states = st.just(0) if snapshots is not None or windows else st.sampled_from([0, 4, 40])
    window = draw(st.sampled_from([1, 5, 16, 33])) if windows else 0
    return Knobs(
        window=window,
        window_slots=(window_pages(page, window) + draw(st.integers(0, 20))) * page if windows else 0,
        page=page,
        pool=max(draw(st.integers(6, 40)) * page, 96 // page * page),
        chunk=draw(st.sampled_from([None, 5, 16, 64])),
        mixed=draw(st.booleans()),
        radix=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority"])),
        depth=draw(st.sampled_from([1, 2, 2, 3])),
        stages=draw(st.sampled_from([1, 1, 2, 3])),
        drafts=(drafts := draw(st.sampled_from([0, 0, 1, 5]))),
        guesses_there=drafts > 0 and draw(st.booleans()),
        host_pages=draw(only_without_states),
        snapshots=snapshots,
        rows=draw(st.integers(1, 6)),
        conservativeness=draw(st.sampled_from([0.001, 1.0])),
        encoders=draw(st.integers(0, 2)),
        space_rows=draw(st.sampled_from([0, 3, 10, 1000])),
        host_rows=draw(st.sampled_from([None, 0, 5, 1000])),
        disk=draw(st.booleans()),
    )


@st.composite
def requests(draw, grammars=()):
    """Up to ten requests with common beginnings, pictures and clips, and these grammars."""
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
