"""The work of an encoder for consumers elsewhere: a client of the encoder pool, like a scheduler.

Each `Ask` becomes a held key of the pool, which looks in all tiers of its cache. The pool wants to encode what it does
not find, and only then are the pixels fetched: `PixelsOnDemand` stands between the pool and its workers. So the pool's
budgets bound the pixels that are under way, too. Equal content of several consumers is found or encoded once, with the
pixels of any of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vision.cache.stats import LinkStats
from vision.encoder_pool import EncoderPool
from vision.remote.encoder_server import EncoderServer, Event, Gone
from vision.remote.protocol import LEASE_S, RENEW_S, SILENT_S, Answer, Ask, Pixels, Pull, Release, Rows, Status
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncoderBackend, EncodeResult
from vlmserve_common.checkpoint.adapter_ref import AdapterRef, check_place
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.errors import CheckpointError

log = logging.getLogger(__name__)

_MOST_LEASES = 2**16
"""Of one consumer; each is small until it has its turn."""


class PixelsOnDemand:
    """An `EncoderBackend` in front of another one, whose batches wait until their pixels are there.

    A temporal patch without pixels has an empty array in their place. `wanted` are the digests of those.
    """

    def __init__(self, inner: EncoderBackend) -> None:
        self.takes_turns = inner.takes_turns
        self._inner = inner
        self._waiting: dict[int, tuple[int, EncodeBatch]] = {}  # number -> worker, batch
        self._results: list[EncodeResult] = []

    @property
    def wanted(self) -> set[bytes]:
        """Return the digests of the patches whose pixels are waited for."""
        return {patch.digest for _, batch in self._waiting.values() for patch in batch.patches if not patch.pixels.size}

    def supply(self, pixels: Pixels, digest: bytes) -> None:
        """Give the pixels of a wanted patch. A batch that is complete is started."""
        for number, (worker, batch) in list(self._waiting.items()):
            patches = tuple(
                replace(patch, pixels=pixels.pixels) if patch.digest == digest else patch for patch in batch.patches
            )
            self._waiting[number] = worker, replace(batch, patches=patches)
            self._start_complete(number)

    def give_up(self, digest: bytes) -> None:
        """End the batch of a wanted patch, whose pixels will not come. Its other patches are tried again."""
        for number, (_, batch) in list(self._waiting.items()):
            if any(patch.digest == digest for patch in batch.patches):
                self._drop(number)

    def workers(self) -> Sequence[int]:
        return self._inner.workers()

    def start(self, worker: int, batch: EncodeBatch) -> None:
        self._waiting[batch.number] = worker, batch
        self._start_complete(batch.number)

    def cancel(self, worker: int, number: int) -> None:
        if number in self._waiting:
            self._drop(number)
        else:
            self._inner.cancel(worker, number)

    def collect(self) -> list[EncodeResult]:
        results, self._results = self._results, []
        return results + self._inner.collect()

    @property
    def has_work(self) -> bool:
        return self._inner.has_work

    def work(self, budget_s: float) -> bool:
        return self._inner.work(budget_s)

    def write_tower(self, source: WeightSource) -> None:
        self._inner.write_tower(source)

    def wait_handles(self) -> Sequence[int]:
        return self._inner.wait_handles()

    def close(self) -> None:
        self._inner.close()

    def _start_complete(self, number: int) -> None:
        worker, batch = self._waiting[number]
        if all(patch.pixels.size for patch in batch.patches):
            del self._waiting[number]
            self._inner.start(worker, batch)

    def _drop(self, number: int) -> None:
        del self._waiting[number]
        self._results.append(EncodeResult(number=number, embeds=None, error="its pixels did not come", untried=True))


@dataclass(eq=False)
class _Lease:
    """A consumer's hold on a key of the pool. told: what it knows."""

    key: bytes
    digest: bytes
    order: int
    told: Status | None = None


@dataclass(frozen=True, slots=True)
class _Debt:
    """Pixels that a consumer owes for one of its leases. since: by the service's clock."""

    consumer: int
    number: int
    since: float


class EncodeService:
    """Answers consumers from an encoder pool over `backend`: call `step` again and again, in one thread. `clock`: in
    seconds. takes_adapters, folder: whether LoRA adapters may change the tower, and where they must lie; None:
    anywhere."""

    def __init__(
        self,
        pool: EncoderPool,
        backend: PixelsOnDemand,
        server: EncoderServer,
        clock: Callable[[], float] = time.monotonic,
        *,
        takes_adapters: bool = False,
        folder: str | None = None,
    ) -> None:
        self._takes_adapters, self._folder = takes_adapters, folder
        self._pool = pool
        self._backend = backend
        self._server = server
        self._clock = clock
        self._look_at = 0.0
        self._leases: dict[int, dict[int, _Lease]] = {}  # consumer -> number -> lease
        self._asked: dict[bytes, _Debt] = {}  # digest -> who owes its pixels
        self._asks = self._rows = self._pixels = 0

    def stats(self) -> LinkStats:
        """Return the figures of all links."""
        sent, received = self._server.traffic()
        return LinkStats(
            links=self._server.num_consumers,
            open=sum(map(len, self._leases.values())),
            asked=self._asks,
            pixels=self._pixels,
            rows=self._rows,
            sent_bytes=sent,
            received_bytes=received,
        )

    def step(self, budget_s: float) -> bool:
        """Take events, encode for about so many seconds if this process does that, and answer. False: there is nothing
        to do until one of `wait_handles` is readable, or `RENEW_S` have passed."""
        for consumer, event in self._server.take():
            self._handle(consumer, event)
        busy = self._pool.advance()
        busy |= self._answer_all()
        if self._pool.has_work:
            busy |= self._pool.work(budget_s)
        if (now := self._clock()) >= self._look_at:
            self._look_at = now + RENEW_S
            self._drop_silent()
        return busy

    def wait_handles(self) -> list[int]:
        """Return the file descriptors to wait for after `step` returned False."""
        return [self._server.fd, *self._pool.wait_handles()]

    def _handle(self, consumer: int, event: Event) -> None:
        """Take one event. A consumer that breaks the protocol is dropped."""
        leases = self._leases.setdefault(consumer, {})
        if isinstance(event, Gone):
            for lease in leases.values():
                self._pool.release([lease.key], order=lease.order)
            del self._leases[consumer]
        elif isinstance(event, Ask):
            self._ask(consumer, event)
        elif event.number not in leases:
            # a lease that has ended here may be released there at the same time
            if not isinstance(event, Release):
                self._answer(consumer, event.number, Status.ERROR, "there is no lease of this number")
        elif isinstance(event, Release):
            self._end(consumer, event.number)
        elif isinstance(event, Pixels):
            self._take_pixels(consumer, event)
        else:
            self._send_rows(consumer, event, leases[event.number])

    def _answer_all(self) -> bool:
        """Tell consumers what is new, and fetch pixels; return True if there was anything."""
        told = False
        for consumer, leases in self._leases.items():
            for number, lease in list(leases.items()):
                told |= self._tell(consumer, number, lease)
        return self._fetch() or told

    def _drop_silent(self) -> None:
        """Drop consumers that owe pixels and are silent, or owe them for long, since others wait with them."""
        for debt in self._asked.values():
            if self._server.silent_s(debt.consumer) > SILENT_S:
                self._server.drop(debt.consumer, f"the consumer owes pixels, and said nothing for {SILENT_S:g} s")
            elif self._clock() - debt.since > LEASE_S:
                self._server.drop(debt.consumer, f"the consumer did not send pixels within {LEASE_S:g} s")

    def _ask(self, consumer: int, ask: Ask) -> None:
        leases, patch = self._leases[consumer], ask.patch
        shape = self._pool.embed_shape
        if ask.number in leases or len(leases) >= _MOST_LEASES or patch.pixels.size or patch.encoded:
            self._server.drop(consumer, "an Ask that cannot be")
        elif not shape.suits(patch) or shape.of(patch) != ask.shape:
            allowed = f"a picture of grid {patch.grid} has no rows of shape {ask.shape} here"
            self._answer(consumer, ask.number, Status.INCOMPATIBLE, allowed)
        elif reason := self._why_not(patch.adapter):
            self._answer(consumer, ask.number, Status.INCOMPATIBLE, reason)
        else:
            self._asks += 1
            (key,) = self._pool.submit([patch], order=self._asks)
            leases[ask.number] = _Lease(key, patch.digest, self._asks)

    def _why_not(self, adapter: AdapterRef | None) -> str:
        """Return why an adapter cannot change the tower here; "" if it can, as far as is known."""
        if adapter is None:
            return ""
        if not self._takes_adapters:
            return "this encoder takes no LoRA adapters (setting --enable-lora)"
        try:
            check_place(adapter.path, self._folder)
        except CheckpointError as error:
            return f"the adapter is in {error}"
        return ""

    def _tell(self, consumer: int, number: int, lease: _Lease) -> bool:
        if lease.told is Status.OK:
            return False
        if error := self._pool.error(lease.key):
            self._answer(consumer, number, Status.ERROR, error)
            self._end(consumer, number)
            return True
        status = Status.OK if self._pool.is_ready(lease.key) else Status.NOT_READY
        # a consumer that owes pixels knows that they are not ready
        if status is lease.told or (status is Status.NOT_READY and lease.told is Status.MISSING):
            return False
        lease.told = status
        self._answer(consumer, number, status)
        return True

    def _fetch(self) -> bool:
        """Ask for the pixels of all patches that are wanted, each of one consumer."""
        wanted = self._backend.wanted
        for digest, debt in list(self._asked.items()):
            if digest not in wanted or debt.number not in self._leases.get(debt.consumer, {}):
                del self._asked[digest]
        unasked = wanted - self._asked.keys()
        if not unasked:
            return False
        for consumer, leases in self._leases.items():
            for number, lease in leases.items():
                if lease.digest in unasked:
                    unasked.remove(lease.digest)
                    self._asked[lease.digest] = _Debt(consumer, number, self._clock())
                    lease.told = Status.MISSING
                    self._answer(consumer, number, Status.MISSING)
        for digest in unasked:
            self._backend.give_up(digest)
        return True

    def _take_pixels(self, consumer: int, pixels: Pixels) -> None:
        digest = self._leases[consumer][pixels.number].digest
        debt = self._asked.get(digest)
        if debt is None or (debt.consumer, debt.number) != (consumer, pixels.number) or not pixels.pixels.size:
            self._server.drop(consumer, "Pixels that nobody asked for")
            return
        del self._asked[digest]
        self._pixels += 1
        self._backend.supply(pixels, digest)

    def _send_rows(self, consumer: int, pull: Pull, lease: _Lease) -> None:
        if not self._pool.is_ready(lease.key):  # another patch needed the room
            lease.told = None
            return
        self._rows += 1
        self._server.send(consumer, Rows(number=pull.number, rows=self._pool.embeds(lease.key).cpu()))

    def _answer(self, consumer: int, number: int, status: Status, reason: str = "") -> None:
        self._server.send(consumer, Answer(number=number, status=status, reason=reason))

    def _end(self, consumer: int, number: int) -> None:
        lease = self._leases[consumer].pop(number)
        self._pool.release([lease.key], order=lease.order)
