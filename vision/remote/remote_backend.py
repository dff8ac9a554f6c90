"""Encodes temporal patches on other servers, and at home what they fail to do.

The encoders' links run in an event loop of their own. There, each temporal patch is fetched by one coroutine: it
chooses an encoder, asks for the rows, goes on to another encoder if that one fails, and gives up when the time is over.
What was given up goes to the backend at home, in the thread of the encoder pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future

import blake3
import torch

from vision.cache.stats import LinkStats
from vision.remote.encoder_link import EncoderLink, LinkError
from vision.remote.protocol import TowerIdentity
from vision.towers.temporal_patch import EncodeBatch, TemporalPatch
from vision.workers.backend import EncoderBackend, EncodeResult
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.errors import EngineError
from vlmserve_common.process.loop_thread import LoopThread
from vlmserve_common.process.wake_up import Mailbox

log = logging.getLogger(__name__)

BATCHES_AHEAD = 256
"""Temporal patches that encoders are asked for at a time. Each is a batch: a pool needs `max_patches` of 1."""
_REST_S = 10.0
"""How long an encoder that was late gets nothing new."""
_UNEVEN = 1.25
"""An encoder may have so many times its share of the vision patches before others are asked in its place."""


class RemoteBackend:
    """An `EncoderBackend` with one worker, number 0, which stands for all encoders. Batches hold one temporal patch.

    home: encodes what they do not. urls: tcp://HOST:PORT of each. tower: the one at home. rows: the shape of a temporal
    patch's rows. key: see `peers`. timeout_s: how long all encoders together may take for a temporal patch.
    """

    def __init__(
        self,
        home: EncoderBackend,
        urls: Sequence[str],
        *,
        tower: TowerIdentity,
        rows: Callable[[TemporalPatch], tuple[int, int]],
        key: str | None,
        timeout_s: float,
    ) -> None:
        self.takes_turns = home.takes_turns
        self._home = home
        self._rows = rows
        self._timeout_s = timeout_s
        self._fetching: dict[int, tuple[EncodeBatch, Future[torch.Tensor]]] = {}
        self._fetched = Mailbox[int]()
        self._at_home: dict[int, int] = {}  # batch -> worker
        self._given_up = self._late = 0
        self._closed = False
        self._links = [EncoderLink(url, tower, key) for url in urls]
        self._thread = LoopThread("encoder-links")
        self._running = [self._thread.start(link.run()) for link in self._links]

    # ------------------------------------------------------------ the pool's thread

    def workers(self) -> Sequence[int]:
        return (0,)

    def start(self, worker: int, batch: EncodeBatch) -> None:
        (patch,) = batch.patches
        future = self._thread.start(self._fetch(patch))
        self._fetching[batch.number] = batch, future
        future.add_done_callback(lambda _: self._came(batch.number))

    def cancel(self, worker: int, number: int) -> None:
        if number in self._at_home:
            self._home.cancel(self._at_home[number], number)
        elif number in self._fetching:
            self._fetching[number][1].cancel()

    def collect(self) -> list[EncodeResult]:
        if self._closed:
            return []
        results = []
        for number in self._fetched.take():
            batch, future = self._fetching.pop(number)
            try:
                results.append(EncodeResult(number=batch.number, embeds=(future.result(),)))
            except CancelledError:
                results.append(_failed(batch, "nobody wants it any more"))
            except Exception as error:  # whatever it is
                log.debug("a picture is encoded at home: %s", error)
                results.extend(self._encode_at_home(batch))
        for result in self._home.collect():
            self._at_home.pop(result.number, None)
            results.append(result)
        return results

    def write_tower(self, source: WeightSource) -> None:
        """Raise EngineError, as encoders on other servers keep their weights."""
        raise EngineError("encoders on other servers keep their weights")

    def wait_handles(self) -> Sequence[int]:
        return () if self._closed else (self._fetched.fd, *self._home.wait_handles())

    def stats(self) -> LinkStats:
        """Return the figures of all links."""
        sent, received = map(sum, zip(*(link.traffic() for link in self._links), strict=True))
        return LinkStats(
            links=sum(link.usable for link in self._links),
            open=sum(link.num_open for link in self._links),
            asked=sum(link.asked for link in self._links),
            pixels=sum(link.pixels for link in self._links),
            rows=sum(link.rows for link in self._links),
            home=self._given_up,
            late=self._late,
            sent_bytes=sent,
            received_bytes=received,
        )

    def close(self) -> None:
        """End the links, and the backend at home."""
        if not self._closed:
            self._closed = True
            self._thread.close()
            self._fetched.close()
        self._home.close()

    def _encode_at_home(self, batch: EncodeBatch) -> list[EncodeResult]:
        """Start a batch at home; return its failure if there is no worker."""
        self._given_up += 1
        workers = self._home.workers()
        if not workers:
            return [_failed(batch, "no vision encoder worker is left at home")]
        busy = Counter(self._at_home.values())
        worker = min(workers, key=lambda one: busy[one])
        self._at_home[batch.number] = worker
        self._home.start(worker, batch)
        return []

    # ------------------------------------------------------------ the device's thread

    @property
    def has_work(self) -> bool:
        return self._home.has_work

    def work(self, budget_s: float) -> bool:
        return self._home.work(budget_s)

    # ------------------------------------------------------------ the links' thread

    def _came(self, number: int) -> None:
        if not self._closed:
            self._fetched.put(number)

    async def _fetch(self, patch: TemporalPatch) -> torch.Tensor:
        """Return the rows of a temporal patch. Raises LinkError if no encoder has made them in time."""
        tried: list[EncoderLink] = []
        reason = "no encoder is there"
        try:
            async with asyncio.timeout(self._timeout_s):
                while (link := self._choose(patch, tried)) is not None:
                    tried.append(link)
                    try:
                        return await link.fetch(patch, self._rows(patch))
                    except LinkError as error:
                        reason = f"{link.url}: {error}"
        except TimeoutError:
            self._late += 1
            link, now = tried[-1], asyncio.get_running_loop().time()
            if link.rests_until <= now:
                log.warning("the encoder %s was not done after %g s, and rests", link.url, self._timeout_s)
            link.rests_until = now + _REST_S
            reason = f"{link.url} was late"
        raise LinkError(reason)

    def _choose(self, patch: TemporalPatch, tried: Collection[EncoderLink]) -> EncoderLink | None:
        """Return the encoder for a patch, or None if there is none that was not tried.

        Each content has an order of all encoders, the same on every server, so that their caches share no work. The
        first one that has not much more than its share to do gets it.
        """
        now = asyncio.get_running_loop().time()
        there = [link for link in self._links if link.usable and link not in tried and link.rests_until <= now]
        if not there:
            return None
        there.sort(key=lambda link: blake3.blake3(link.url.encode() + patch.digest).digest())
        share = (sum(link.patches for link in there) + patch.num_patches) / len(there)
        return next((link for link in there if link.patches + patch.num_patches <= _UNEVEN * share), there[0])


def _failed(batch: EncodeBatch, error: str) -> EncodeResult:
    return EncodeResult(number=batch.number, embeds=None, error=error, untried=True)
