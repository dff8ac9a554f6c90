"""The disk behind the memory tiers. Threads read and write it, so that its callers never wait for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch

from vision.cache.stats import TierStats
from vision.cache.store import EmbeddingStore
from vlmserve_common.process.wake_up import WakeUp

log = logging.getLogger(__name__)


def _host_copier(embeds: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that copies embeddings from any device to the CPU, in any thread. Making it waits for nothing.

    Written by torch's documentation; it has not been run on a GPU.
    """
    if not embeds.is_cuda:
        return lambda: embeds
    computed = torch.cuda.Event()
    computed.record(torch.cuda.current_stream(embeds.device))

    def copy() -> torch.Tensor:
        # a stream of its own: behind what computed them, and behind nothing that was asked for since
        stream = torch.cuda.Stream(embeds.device)
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            return embeds.cpu()

    return copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The result of a load. `embeds`: on the CPU; None if the disk does not have them."""

    key: bytes
    embeds: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The result of a save. `number`: of the save. `ok`: the embeddings are on disk and survive a crash. `new`: they
    were not there before."""

    number: int
    key: bytes
    ok: bool
    new: bool = False


Done: TypeAlias = Loaded | Saved


class DiskTier:
    """Loads and saves in the background for one thread, which collects the results.

    `backlog_bytes`: embeddings that may wait to be written, on their device until their turn. Above it, only saves that
    insist are done. `saving`: saves whose result was not collected yet.
    """

    def __init__(self, store: EmbeddingStore, *, backlog_bytes: int = 256 * 2**20) -> None:
        self.store = store
        self._backlog_limit = backlog_bytes
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="embedding-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="embedding-writer")
        self._done: deque[Done] = deque()
        self._lock = threading.Lock()
        self._waiting_bytes = self._waiting = 0
        self.saving = 0
        self._saves = 0
        self._closed = False
        self._wake_up = WakeUp()

    def load(self, key: bytes) -> None:
        """Begin to read. The result is a `Loaded`."""
        self._readers.submit(self._load, key)

    def save(self, key: bytes, embeds: torch.Tensor, *, insist: bool = False, pin: bool = False) -> int:
        """Begin to write embeddings from any device, and return the save's unique number. The result is a `Saved` with
        it.

        `insist`: save them whatever the backlog.
        """
        self.saving += 1
        self._saves += 1
        with self._lock:
            fits = not self._waiting_bytes or self._waiting_bytes + embeds.nbytes <= self._backlog_limit
            if fits or insist:
                self._waiting_bytes += embeds.nbytes
                self._waiting += 1
        if fits or insist:
            self._writer.submit(self._save, self._saves, key, embeds.nbytes, _host_copier(embeds), pin)
        else:
            self._finish(Saved(number=self._saves, key=key, ok=False))
        return self._saves

    def collect(self) -> list[Done]:
        """Return the results since the last call."""
        self._wake_up.take()
        done = [self._done.popleft() for _ in range(len(self._done))]
        self.saving -= sum(isinstance(one, Saved) for one in done)
        return done

    def wait_handle(self) -> int:
        """Return a file descriptor that becomes readable when there is a result."""
        return self._wake_up.fd

    def stats(self) -> TierStats:
        return self.store.stats()

    def flush(self, timeout_s: float) -> int:
        """Block until the present backlog is written, but at most so long; return how many saves still wait.

        Any thread can call it before `close`.
        """
        try:
            self._writer.submit(int).result(timeout_s)  # behind them all
        except TimeoutError:
            with self._lock:
                return self._waiting
        return 0

    def close(self) -> None:
        """Write the backlog, and end the threads. Can be called again."""
        if self._closed:
            return
        self._closed = True
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._wake_up.close()

    def _load(self, key: bytes) -> None:
        embeds = None
        try:
            embeds = self.store.get(key)
        except Exception:
            log.exception("an embedding could not be read")
        self._finish(Loaded(key=key, embeds=embeds))

    def _save(self, number: int, key: bytes, nbytes: int, copy: Callable[[], torch.Tensor], pin: bool) -> None:
        ok = new = False
        try:
            new = key not in self.store
            ok = self.store.put(key, copy(), pin=pin)
        except Exception:
            log.exception("an embedding could not be written")
        with self._lock:
            self._waiting_bytes -= nbytes
            self._waiting -= 1
        self._finish(Saved(number=number, key=key, ok=ok, new=new and ok))

    def _finish(self, done: Done) -> None:
        self._done.append(done)
        self._wake_up.call()
