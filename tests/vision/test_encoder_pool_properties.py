"""The encoder pool whatever happens, in any order: requests that come, get on, go back and go; workers that finish,
fail and die; a disk that has rows, has not, or has others; writes that fail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.vision.fake_backend import EMBED_SHAPE, ROW_BYTES, FakeBackend, make_pool, rows_of
from tests.vision.fake_disk import FakeDisk
from vision.towers.temporal_patch import TemporalPatch

SIZES = (1, 1, 2, 2, 3, 5, 8)
ENCODED = TemporalPatch(digest=b"z" * 32, grid=(2, 4), pixels=np.full((2, 2), 7, np.float32), encoded=True)
CONTENTS = (
    *(
        TemporalPatch(digest=bytes([97 + number]) * 32, grid=(2, 2 * rows), pixels=np.zeros((4 * rows, 1)))
        for number, rows in enumerate(SIZES)
    ),
    ENCODED,
)


@dataclass
class Request:
    """Holds what it needs of its temporal patches from number `start` on."""

    order: int
    patches: list[TemporalPatch]
    start: int
    keys: list[bytes]


class CountingBackend(FakeBackend):
    """Counts what was done, and how often each content was in a batch that was tried and failed."""

    def __init__(self, workers: int, *, inline: bool, cancels: bool) -> None:
        super().__init__(workers, inline=inline, cancels=cancels)
        self.tried: Counter[bytes] = Counter()
        self.done = 0

    def collect(self):
        results = super().collect()
        patches = {batch.number: batch.patches for _, batch in self.batches}
        for result in results:
            if result.embeds is not None:
                self.done += len(result.embeds)
            elif not result.untried:
                self.tried.update(patch.digest for patch in patches[result.number])
        return results

    def out(self) -> list[TemporalPatch]:
        return [patch for queue in self.queues.values() for batch in queue for patch in batch.patches]


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        workers=st.integers(0, 3),
        space=st.sampled_from([0, 4, 9, 100]),
        cache=st.sampled_from([0, 4, 9, 100]),
        host=st.sampled_from([None, 0, 5, 100]),
        with_disk=st.booleans(),
        max_patches=st.sampled_from([4, 12, 64]),
        cancels=st.booleans(),
    )
    def begin(self, workers, space, cache, host, with_disk, max_patches, cancels):
        self.backend = CountingBackend(max(workers, 1), inline=workers == 0, cancels=cancels)
        self.disk = FakeDisk() if with_disk else None
        self.pool = make_pool(
            self.backend,
            max_patches=max_patches,
            space_rows=space,
            cache_rows=cache,
            host_rows=host,
            disk=self.disk,
        )
        self.space, self.max_patches = space * ROW_BYTES, max_patches
        self.requests: list[Request] = []
        self.arrivals = 0
        self.forced: set[bytes] = set()
        self.seen_batches = 0
        self.failures = 0

    # ------------------------------------------------------------ requests

    @rule(patches=st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=6), data=st.data())
    def arrive(self, patches, data):
        request = Request(self.arrivals, patches, len(patches), [])
        self.arrivals += 1
        self.requests.append(request)
        self.want(request, data.draw(st.integers(0, len(patches) - 1)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def move(self, data):
        """On, or back after a retraction."""
        request = data.draw(st.sampled_from(self.requests))
        self.want(request, data.draw(st.integers(0, len(request.patches))))

    def want(self, request: Request, start: int) -> None:
        if start < request.start:
            more = request.patches[start : request.start]
            keys = self.pool.submit(more, order=request.order, place=start)
            assert keys == [self.pool.key(patch) for patch in more]
            request.keys = keys + request.keys
        else:
            gone = start - request.start
            self.pool.release(request.keys[:gone], order=request.order, place=request.start)
            request.keys = request.keys[gone:]
        request.start = start
        if start == len(request.patches):
            self.requests.remove(request)

    # ------------------------------------------------------------ workers

    @rule(data=st.data(), urgently=st.integers(0, 3))
    def advance(self, data, urgently):
        urgent = None
        if urgently == 0 and self.requests:
            urgent = data.draw(st.sampled_from(data.draw(st.sampled_from(self.requests)).keys))
            self.forced.add(urgent)
        self.step(urgent)

    def step(self, urgent=None) -> bool:
        kept = self.kept()
        changed = self.pool.advance(urgent=urgent)
        for worker, batch in self.backend.batches[self.seen_batches :]:
            assert worker in self.backend.usable
            digests = [patch.digest for patch in batch.patches]
            assert len(batch.patches) == 1 or sum(patch.num_patches for patch in batch.patches) <= self.max_patches
            assert len(set(digests)) == len(digests)
            assert not any(patch.encoded for patch in batch.patches)
            if not self.backend.inline:
                out = [patch.digest for patch in self.backend.out()]
                assert len(set(out)) == len(out), "encoded twice at a time"
                assert not set(digests) & kept & self.kept(), "encoded although it is kept"
        self.seen_batches = len(self.backend.batches)
        assert all(len(queue) <= 2 for queue in self.backend.queues.values())
        self.take_failures()
        return changed

    def kept(self) -> set[bytes]:
        """Digests of what is in memory."""
        tiers = [tier for tier in (self.pool.cache.device, self.pool.cache.host) if tier is not None]
        return {patch.digest for patch in CONTENTS for tier in tiers if self.pool.key(patch) in tier}

    def take_failures(self) -> None:
        digests = {self.pool.key(patch): patch.digest for patch in CONTENTS}
        failures = self.pool.take_failures()
        for key, error in failures.items():
            self.failures += 1
            assert error in ("died", "RuntimeError: poisoned")
            assert self.backend.tried[digests[key]] >= 2, "given up before it was tried twice"
            assert any(key in request.keys for request in self.requests), "a failure that concerns nobody"
        for request in [request for request in self.requests if failures.keys() & set(request.keys)]:
            self.want(request, len(request.patches))

    @precondition(lambda self: any(self.backend.queues.values()))
    @rule(data=st.data())
    def finish(self, data):
        self.backend.finish(data.draw(st.sampled_from([n for n, queue in self.backend.queues.items() if queue])))

    @rule(content=st.sampled_from(CONTENTS[:-1]), times=st.integers(1, 3))
    def poison(self, content, times):
        self.backend.fail[content.digest] = times

    @precondition(lambda self: not self.backend.inline)
    @rule(data=st.data(), give_up=st.booleans())
    def die(self, data, give_up):
        worker = data.draw(st.sampled_from(self.backend.usable))
        self.backend.die(worker)
        if give_up and len(self.backend.usable) > 1:
            self.backend.usable.remove(worker)

    # ------------------------------------------------------------ the disk

    @precondition(lambda self: self.disk is not None and self.disk.loads)
    @rule(what=st.sampled_from(["as it is", "gone", "misshaped"]))
    def load(self, what):
        key = self.disk.loads[0]
        if what == "gone":
            self.disk.rows.pop(key, None)
        elif what == "misshaped":
            self.disk.rows[key] = torch.zeros((1, 1), dtype=torch.int32)
        self.disk.finish_load()

    @precondition(lambda self: self.disk is not None and self.disk.saves)
    @rule(well=st.booleans())
    def saved(self, well):
        self.disk.broken = not well
        self.disk.finish_save()

    @precondition(lambda self: self.disk is not None and self.requests)
    @rule(data=st.data(), pin=st.booleans())
    def save(self, data, pin):
        request = data.draw(st.sampled_from(self.requests))
        wanted = zip(request.keys, request.patches[request.start :], strict=True)
        keys = [key for key, patch in wanted if self.pool.is_ready(key) and not patch.encoded]
        for key in keys:
            self.pool.save(key, pin=pin)
        assert all(self.pool.is_saved(key) is None for key in keys)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def rows_are_the_right_ones(self):
        for request in getattr(self, "requests", ()):
            for patch, key in zip(request.patches[request.start :], request.keys, strict=True):
                if self.pool.is_ready(key):
                    rows = self.pool.embeds(key)
                    want = torch.full((2, 2), 7, dtype=torch.int32) if patch.encoded else rows_of(patch)
                    assert torch.equal(rows, want)

    @invariant()
    def budgets_are_kept(self):
        if not hasattr(self, "pool"):
            return
        device = self.pool.cache.device
        assert device.bytes <= max(device.limit_bytes, device.held_bytes)
        host = self.pool.cache.host
        assert host is None or host.bytes <= host.limit_bytes
        under_way = {patch.digest for patch in self.backend.out()}
        loading = set(self.disk.loads) if self.disk else set()
        held = {key for request in self.requests for key in request.keys if self.pool.is_ready(key)}
        used = [
            EMBED_SHAPE.nbytes(patch)
            for patch in CONTENTS
            if (key := self.pool.key(patch)) in held | loading or patch.digest in under_way
            if key not in self.forced
        ]
        assert sum(used) <= self.space or len(used) == 1

    @invariant()
    def what_nobody_wants_is_cancelled_once(self):
        if not hasattr(self, "pool"):
            return
        wanted = {key for request in self.requests for key in request.keys}
        for queue in self.backend.queues.values():
            for batch in queue:
                unwanted = not any(self.pool.key(patch) in wanted for patch in batch.patches)
                times = self.backend.cancelled.count(batch.number)
                assert times <= 1
                assert times or not unwanted

    @invariant()
    def figures_add_up(self):
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()
        ready = {key for request in self.requests for key in request.keys if self.pool.is_ready(key)}
        patches = {self.pool.key(patch): patch for patch in CONTENTS}
        assert stats.device.held_bytes == sum(EMBED_SHAPE.nbytes(patches[key]) for key in ready)
        assert stats.encoded == self.backend.done
        if not self.requests:
            assert stats.queued == 0

    # ------------------------------------------------------------ the end

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.requests_get_on_in_order()
        while self.pool.busy:
            self.all_finish()
        stats = self.pool.stats()
        assert (stats.queued, stats.under_way, stats.device.held_bytes) == (0, 0, 0)
        assert stats.encoded == self.backend.done
        assert stats.failed >= self.failures
        device, host = self.pool.cache.device, self.pool.cache.host
        assert device.bytes <= device.limit_bytes
        assert host is None or host.bytes <= host.limit_bytes
        assert ENCODED.digest not in self.kept()
        for patch in CONTENTS:  # nothing is known of anything that nobody holds
            try:
                self.pool.is_ready(self.pool.key(patch))
            except KeyError:
                continue
            raise AssertionError(f"an entry is left: {patch.digest!r}")

    def requests_get_on_in_order(self):
        """The oldest request gets on, without anything urgent, though all others keep what they hold."""
        patience = 0
        while self.requests:
            oldest = min(self.requests, key=lambda request: request.order)
            patience += 1
            assert patience < 300, "the oldest request does not get on"
            if self.pool.is_ready(oldest.keys[0]):
                self.want(oldest, oldest.start + 1)
            else:
                self.all_finish()

    def all_finish(self):
        self.step()
        for number, queue in self.backend.queues.items():
            while queue:
                self.backend.finish(number)
        if self.disk is not None:
            self.disk.broken = False
            self.disk.finish_all()
        self.step()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
