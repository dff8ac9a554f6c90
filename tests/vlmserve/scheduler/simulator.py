"""The real scheduler, pools and caches on a simulated clock: events come at their times, and steps and encodings take
what a model of their costs says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.vision.fake_backend import FakeBackend
from tests.vlmserve.scheduler.lazy_queue import Lazy, LazyQueue
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.ipc.messages import AbortReq, TokenizedGenerateReqInput


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
class Arrival:
    """A message, when it comes."""

    at_s: float
    message: TokenizedGenerateReqInput | AbortReq


class _Timed(Lazy):
    owner: TimedQueue

    def __init__(self, *about) -> None:
        super().__init__(*about)
        self._submitted = self.owner.clock.now

    def compute(self) -> None:
        clock = self.owner.clock
        clock.device_free = max(clock.device_free, self._submitted)
        super().compute()  # moves device_free on by what it costs
        self._ended = clock.device_free

    def result(self):
        result = super().result()
        self.owner.clock.now = max(self.owner.clock.now, self._ended)
        return result


class TimedQueue(LazyQueue):
    """A device beside the scheduler's thread."""

    work = _Timed

    def __init__(self, clock: Simulation, depth: int) -> None:
        super().__init__(depth)
        self.clock, self.least_reqs = clock, 0


class CostlyWorker:
    """A fake worker whose steps take their time on the clock."""

    def __init__(self, simulation: Simulation) -> None:
        self._worker, self._clock, self._costs = simulation.worker, simulation, simulation.costs

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


class SlicedBackend(FakeBackend):
    """One encoder in the scheduler's process: it works when it is told to, for so long, and batches take turns."""

    takes_turns = True

    def __init__(self, clock: Simulation) -> None:
        super().__init__(inline=False)
        self._clock, self._costs = clock, clock.costs
        self._done: dict[int, int] = {}  # patches of each batch

    @property
    def has_work(self) -> bool:
        return bool(self.queues[0])

    def work(self, budget_s: float) -> bool:
        queue, left = self.queues[0], budget_s
        worked = bool(queue)
        while queue and (left > 0 or left == budget_s):
            batch, before = queue[0], self._done.get(queue[0].number, 0)
            done = min(before + self._costs.piece, sum(patch.num_patches for patch in batch.patches))
            self._done[batch.number] = done
            self._clock.device_free += (done - before) * self._costs.patch_s
            left -= (done - before) * self._costs.patch_s
            if done == sum(patch.num_patches for patch in batch.patches):
                self.finish()
            else:
                queue.rotate(-1)
        return worked

    def wait_handles(self) -> list[int]:
        return []


class Simulation(Rig):
    """Runs all that arrives to its end. check_turns: see `Rig.check`.

    now: of the scheduler's thread. device_free: when the device will have done what it has begun. arrived_s, first_s:
    when requests came, and when their first tokens did; first_turn: in which turn of the loop, and arrived_turn
    likewise.
    """

    def __init__(
        self, knobs: Knobs, arrivals: Sequence[Arrival], *, costs: Costs = Costs(), check_turns: bool = True
    ) -> None:
        self.costs, self._check_turns = costs, check_turns
        super().__init__(knobs)
        self.device_free = 0.0
        self.arrived_s: dict[str, float] = {}
        self.arrived_turn: dict[str, int] = {}
        self.first_s: dict[str, float] = {}
        self.first_turn: dict[str, int] = {}
        self.turns = 0
        self._events = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))

    def make_backend(self) -> FakeBackend:
        return SlicedBackend(self)

    def make_worker(self):
        return CostlyWorker(self)

    def make_device(self):
        return TimedQueue(self, self.knobs.depth)

    def ttft_s(self, rid: str) -> float:
        """From a request's arrival to its first token."""
        return self.first_s[rid] - self.arrived_s[rid]

    def step(self) -> bool:
        """One turn of the loop; False after the last."""
        while self._events and self._events[0].at_s <= self.now:
            arrival = self._events.popleft()
            if isinstance(arrival.message, TokenizedGenerateReqInput):
                rid = arrival.message.rid
                self.arrived_s[rid], self.arrived_turn[rid] = arrival.at_s, self.turns
            self.handle(arrival.message)
        busy = self.loop.step()
        self.now += self.costs.turn_s
        self.turns += 1
        if self._check_turns:
            self.check()
        if not busy:
            if not self._events:
                assert self.loop.is_idle(), "requests wait, and nothing will come"
                return False
            self.now = max(self.now, self._events[0].at_s)
        return True

    def take(self, message) -> None:
        super().take(message)
        for one in message.outputs:
            if one.rid not in self.first_s and one.token_ids:
                self.first_s[one.rid], self.first_turn[one.rid] = self.now, self.turns
