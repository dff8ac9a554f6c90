"""The real scheduler, pools and caches on a simulated clock: events come at their times, steps take what a model of
their costs says, and what must always hold is checked after every turn."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tests.vision.fake_backend import EMBED_SHAPE, ROW_BYTES, rows_of
from tests.vlmserve.scheduler.fake_worker import VOCAB, FakeWorker
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EncoderPool, PoolLimits
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncodeResult
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.step import OneGroup
from vlmserve.executor.device_queue import DeviceQueue
from vlmserve.ipc.messages import AbortReq, FinishReason, TokenizedGenerateReqInput
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.memory.prefix_cache import ChunkCache
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.recurrent_states import RecurrentStates
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.scheduler.estimates import NewTokenRatio
from vlmserve.scheduler.kv_cache_manager import KVCacheManager, Sessions
from vlmserve.scheduler.policy import make_policy
from vlmserve.scheduler.req_life import ReqStatus
from vlmserve.scheduler.request_states import RequestStates
from vlmserve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Costs:
    """In seconds. turn: of the scheduler itself. step: of any step, besides its tokens. piece: patches between two
    looks at the clock of an encoder."""

    turn_s: float = 0.0005
    step_s: float = 0.005
    prompt_token_s: float = 0.0001
    decode_row_s: float = 0.0002
    patch_s: float = 0.0002
    piece: int = 16


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The engine that is simulated. snapshots: states for these, of a model with recurrent layers."""

    pool: int = 512
    page: int = 4
    rows: int = 16
    context: int = 160
    chunk: int = 64
    prefill: int = 256
    mixed: bool = False
    radix: bool = True
    policy: str = "fcfs"
    depth: int = 2
    conservativeness: float = 1.0
    space_rows: int = 1000
    max_patches: int = 256
    costs: Costs = Costs()
    check: bool = True
    snapshots: int | None = None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A message, when it comes."""

    at_s: float
    message: TokenizedGenerateReqInput | AbortReq


class Clock:
    """now: of the scheduler's thread. device_free: when the device will have done what it has begun."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device_free = 0.0


class _Pending:
    def __init__(self, queue: SimulatedQueue, run, args) -> None:
        self._queue, self._run, self._args = queue, run, args
        self._submitted = queue.clock.now
        self.done = None

    def compute(self) -> None:
        clock = self._queue.clock
        clock.device_free = max(clock.device_free, self._submitted)
        self.done = DeviceQueue().submit(self._run, *self._args)  # moves device_free on by what it costs
        self._ended = clock.device_free

    def result(self):
        while self.done is None:
            self._queue.waiting.popleft().compute()
        self._queue.clock.now = max(self._queue.clock.now, self._ended)
        return self.done.result()


class SimulatedQueue:
    """A device beside the scheduler's thread. What it does is done as late as can be, and in order."""

    def __init__(self, clock: Clock, depth: int) -> None:
        self.clock = clock
        self.depth = depth
        self.least_reqs = 0
        self.waiting: deque[_Pending] = deque()

    def submit(self, run, *args) -> _Pending:
        work = _Pending(self, run, args)
        self.waiting.append(work)
        return work

    def close(self) -> None:
        while self.waiting:
            self.waiting.popleft().compute()


class CostlyWorker:
    """A fake worker whose steps take their time on the clock."""

    def __init__(self, worker: FakeWorker, clock: Clock, costs: Costs) -> None:
        self._worker, self._clock, self._costs = worker, clock, costs

    def forward(self, batch):
        lengths = (batch.seq_lens - batch.prefix_lens).tolist()
        singles = sum(length == 1 for length in lengths)
        costs = self._costs
        taken = costs.step_s + costs.prompt_token_s * (sum(lengths) - singles) + costs.decode_row_s * singles
        self._clock.device_free += taken
        forwarded = self._worker.forward(batch)
        self._worker.batches.clear()
        return taken, forwarded

    def sample(self, forwarded, info):
        taken, rest = forwarded
        return replace(self._worker.sample(rest, info), compute_s=taken)


class SlicedBackend:
    """One encoder in the scheduler's process: it works when it is told to, for so long, and batches take turns."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        self._clock, self._costs = clock, costs
        self._batches: deque[tuple[EncodeBatch, int]] = deque()  # and the patches of it that are done
        self._results: list[EncodeResult] = []

    def workers(self) -> Sequence[int]:
        return (0,)

    def start(self, worker: int, batch: EncodeBatch) -> None:
        self._batches.append((batch, 0))

    def cancel(self, worker: int, number: int) -> None:
        """All is computed to its end."""

    def collect(self) -> list[EncodeResult]:
        results, self._results = self._results, []
        return results

    @property
    def has_work(self) -> bool:
        return bool(self._batches)

    def work(self, budget_s: float) -> bool:
        worked, left = bool(self._batches), budget_s
        while self._batches and (left > 0 or left == budget_s):
            batch, done = self._batches.popleft()
            total = sum(patch.num_patches for patch in batch.patches)
            piece = min(self._costs.piece, total - done)
            self._clock.device_free += piece * self._costs.patch_s
            left -= piece * self._costs.patch_s
            if done + piece < total:
                self._batches.append((batch, done + piece))
            else:
                rows = tuple(rows_of(patch) for patch in batch.patches)
                self._results.append(EncodeResult(number=batch.number, embeds=rows))
        return worked

    def wait_handles(self) -> list[int]:
        return []

    def close(self) -> None:
        self._batches.clear()


class SlicedPool(EncoderPool):
    """An encoder pool whose backend works in slices."""

    @property
    def has_work(self) -> bool:
        return self._backend.has_work

    def work(self, budget_s: float) -> bool:
        return self._backend.work(budget_s)


class Simulation:
    """Runs all that arrives to its end.

    tokens, finish: of each answer. arrived_s, first_s: when requests came, and when their first tokens did; first_turn:
    in which turn of the loop, and arrived_turn likewise. admitted: requests in the order in which their prompts were
    begun. served: tokens of each client, an output token counting as in its turns.
    """

    def __init__(self, setup: Setup, arrivals: Sequence[Arrival]) -> None:
        self.setup = setup
        self.clock = Clock()
        allocator = TokenToKVPoolAllocator(setup.pool, setup.page)
        max_req_len = min(setup.context, setup.pool - setup.page)
        rows = ReqPoolAllocator(setup.rows, max_req_len + setup.page)
        cache = RadixCache(allocator) if setup.radix else ChunkCache(setup.page)
        self.kv = KVCacheManager(allocator, cache, rows, states=_states(setup))
        worker = self.worker = FakeWorker(setup.pool + setup.page, setup.rows, max_req_len + setup.page)
        space = setup.space_rows * ROW_BYTES
        self.encoder = SlicedPool(
            SlicedBackend(self.clock, setup.costs),
            EmbeddingCache(MemoryTier(space, torch.device("cpu")), None),
            fingerprint=b"tower",
            embed_shape=EMBED_SHAPE,
            limits=PoolLimits(max_patches=setup.max_patches, space_bytes=space),
        )
        self.scheduler = Scheduler(
            EngineArgs(
                model="none",
                max_running_requests=setup.rows,
                max_queued_requests=1_000_000,
                max_prefill_tokens=setup.prefill,
                chunked_prefill_size=setup.chunk,
                enable_mixed_chunk=setup.mixed,
                check_pools_when_idle=True,
                page_size=setup.page,
                schedule_policy=setup.policy,
            ),
            max_req_len=max_req_len,
            eos_token_ids=frozenset({VOCAB + 1}),
            kv=self.kv,
            encoder=self.encoder,
            policy=make_policy(setup.policy, match=self.kv.matched_len, path=self.kv.matched_path),
            new_token_ratio=NewTokenRatio(setup.conservativeness),
            media_keys=MediaKeyTable(),
            sessions=Sessions(self.kv.prefix_cache, max_sessions=8, timeout_s=60, clock=lambda: self.clock.now),
            send=self._take,
        )
        self.loop = EventLoop(
            [self.scheduler],
            worker=OneGroup(CostlyWorker(worker, self.clock, setup.costs)),
            device=SimulatedQueue(self.clock, setup.depth),
            encoder=self.encoder,
            send=self._take,
            max_patches=0,
        )
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self.arrived_s: dict[str, float] = {}
        self.arrived_turn: dict[str, int] = {}
        self.first_s: dict[str, float] = {}
        self.first_turn: dict[str, int] = {}
        self.turns = 0
        self._events = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))

    def ttft_s(self, rid: str) -> float:
        """From a request's arrival to its first token."""
        return self.first_s[rid] - self.arrived_s[rid]

    def run(self) -> Simulation:
        """Until all is done; what was counted."""
        while self.turn():
            pass
        self.loop.flush_cache()
        assert self.kv.allocator.available_size() == self.setup.pool
        if self.kv.states is not None:
            assert self.kv.states.pool.evictable_size() == 0
            assert self.kv.states.held == 0
        stats = self.encoder.stats()
        assert (stats.queued, stats.under_way, stats.device.held_bytes) == (0, 0, 0)
        return self

    def turn(self) -> bool:
        """One of the loop; False after the last."""
        while self._events and self._events[0].at_s <= self.clock.now:
            self._deliver(self._events.popleft())
        busy = self.loop.step()
        self.clock.now += self.setup.costs.turn_s
        self.turns += 1
        if self.setup.check:
            self.check()
        if not busy:
            if not self._events:
                assert self.loop.is_idle(), "requests wait, and nothing will come"
                return False
            self.clock.now = max(self.clock.now, self._events[0].at_s)
        return True

    def _deliver(self, arrival: Arrival) -> None:
        message = arrival.message
        if isinstance(message, TokenizedGenerateReqInput):
            self.arrived_s[message.rid], self.arrived_turn[message.rid] = arrival.at_s, self.turns
        self.loop.handle(message)

    def _take(self, output) -> None:
        for one in output.outputs:
            assert one.rid not in self.finish, "an output after the last"
            assert one.completion_tokens == len(self.tokens[one.rid]) + len(one.token_ids)
            if one.rid not in self.first_s and one.token_ids:
                self.first_s[one.rid], self.first_turn[one.rid] = self.clock.now, self.turns
            self.tokens[one.rid] += one.token_ids
            if one.finish_reason is not None:
                self.finish[one.rid] = one.finish_reason

    def check(self) -> None:
        """What holds after every turn: lengths, lists, and an owner for every slot and place."""
        scheduler, page = self.scheduler, self.setup.page
        scheduler.waiting_queue.check()
        in_progress, running = set(scheduler.waiting_queue.in_progress), set(scheduler.running_batch.reqs)
        queued = set(scheduler.waiting_queue)
        own = places = 0
        for req in scheduler._reqs.values():
            req.check()
            assert (req in queued) == req.status.is_queued, req.rid
            assert (req in in_progress) == (req.status is ReqStatus.PREFILLING), req.rid
            assert (req in running) == (req.status is ReqStatus.DECODING), req.rid
            assert (req.req_pool_idx is None) == req.status.is_queued, req.rid
            places += req.req_pool_idx is not None
            own += -(-req.kv_allocated_len // page) * page - req.protected_len
        assert len(queued) + len(in_progress) + len(running) == len(scheduler._reqs)
        cache, total = self.kv.prefix_cache, self.setup.pool
        free, evictable, locked = self.kv.allocator.available_size(), cache.evictable_size(), cache.protected_size()
        assert free + evictable + locked + own == total, (free, evictable, locked, own, total)
        assert self.kv.req_pool.available_size() + places == self.setup.rows
        if self.kv.states is not None:
            assert self.kv.states.held == places


def _states(setup: Setup) -> RequestStates | None:
    if setup.snapshots is None:
        return None
    return RequestStates(
        RecurrentStates(setup.rows + setup.snapshots, num_slots=setup.pool + setup.page, page_size=setup.page),
        unit=2 * setup.page,
        interval=5 * setup.page,
        snapshots=setup.radix and setup.snapshots > 0,
    )
