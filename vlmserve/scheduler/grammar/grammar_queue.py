"""The grammars that requests wait for, and a cache of compiled ones."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar.grammar_process import GrammarProcesses
from vlmserve.scheduler.grammar.matcher import CompiledGrammar
from vlmserve_common.errors import BadRequestError

MOST_PROCESSES = 64
"""Grammars that have a process at a time."""

_REFUSED_BYTES = 1024
"""The size that a refused grammar counts in the cache, besides its text."""


@dataclass(slots=True)
class _Entry:
    future: Future[CompiledGrammar]
    holders: int = 0


class GrammarQueue:
    """Compiles grammars in threads of its own. One thread calls `get`, `release` and `close`. Clients take turns, and
    leave one of several threads to each other: some grammars take as long as they may.

    cache_bytes: most memory for the processes of grammars without requests, and for refused texts; the least recently
    used go first. A refused grammar is not tried again. most: processes at a time; more grammars wait. workers: threads
    that wait for a process while it compiles.
    """

    def __init__(
        self, processes: GrammarProcesses, *, cache_bytes: int, most: int = MOST_PROCESSES, workers: int = 3
    ) -> None:
        self._processes = processes
        self._cache_bytes = cache_bytes
        self._most = most
        self._room = threading.Semaphore(most)
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._lock = threading.Lock()  # of the next two
        self._waiting: OrderedDict[str, deque[tuple[GrammarSpec, Future[CompiledGrammar]]]] = OrderedDict()
        self._compiling: Counter[str] = Counter()  # grammars of each client
        self._most_each = max(1, workers - 1)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        all_there = threading.Barrier(workers)
        for _ in range(workers):  # now, and not when grammars first pile up: a process holds as many all its life
            self._threads.submit(all_there.wait)

    def get(self, spec: GrammarSpec, client: str = "") -> Future[CompiledGrammar]:
        """Return the future of a compiled grammar (or its BadRequestError), one for all requests with this grammar.
        Call `release` for it. client: whose turn it takes to compile it."""
        entry = self._entries.get(spec)
        if entry is None or (entry.future.done() and _is_accident(entry.future)):
            holders = entry.holders if entry else 0  # who saw the accident releases, too
            entry = self._entries[spec] = _Entry(Future(), holders)
            with self._lock:
                self._waiting.setdefault(client, deque()).append((spec, entry.future))
            self._threads.submit(self._compile_all)
        entry.holders += 1
        self._entries.move_to_end(spec)
        self._trim()
        return entry.future

    def release(self, spec: GrammarSpec) -> None:
        """Give a grammar back. A compilation without waiting requests is not begun."""
        entry = self._entries.get(spec)
        if entry is None:
            return
        entry.holders -= 1
        if not entry.holders and entry.future.cancel():
            del self._entries[spec]
        self._trim()

    @property
    def cached_bytes(self) -> int:
        """Return the bytes that the cache holds."""
        return sum(_size(spec, entry.future) for spec, entry in self._entries.items())

    def close(self) -> None:
        """End all processes, even in the middle of a grammar."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._waiting.clear()
        self._processes.close()
        self._room.release(1 + self._most_each)  # for threads that wait

    def _compile_all(self) -> None:
        """Compile waiting grammars until none is left for this thread: a client that has its share of threads leaves
        its other grammars to them."""
        while True:
            self._room.acquire()
            with self._lock:
                client = next((one for one in self._waiting if self._compiling[one] < self._most_each), None)
                if client is None:
                    self._room.release()
                    return
                specs = self._waiting.pop(client)
                spec, future = specs.popleft()
                if specs:
                    self._waiting[client] = specs  # behind the others
                self._compiling[client] += 1
            self._compile(spec, future)
            with self._lock:
                self._compiling -= Counter([client])  # those at 0 are forgotten

    def _compile(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        if not future.set_running_or_notify_cancel():
            self._room.release()
            return
        try:
            future.set_result(self._processes.compile(spec, closed=self._room.release))
        except BaseException as failure:
            self._room.release()
            future.set_exception(failure)

    def _trim(self) -> None:
        """Let grammars without requests go, the least recently used first, until there is room for all others."""
        size, alive = self.cached_bytes, sum(not _is_refused(entry.future) for entry in self._entries.values())
        for spec in [spec for spec, entry in self._entries.items() if not entry.holders and entry.future.done()]:
            future = self._entries[spec].future
            refused = _is_refused(future)
            if size <= self._cache_bytes and (refused or alive <= self._most):
                continue
            del self._entries[spec]
            size -= _size(spec, future)
            if not refused:
                alive -= 1
                future.result().close("it is not kept any more")


def _is_refused(future: Future[CompiledGrammar]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _is_accident(future: Future[CompiledGrammar]) -> bool:
    """Return True for a grammar that may be tried again: its process could not start, or has ended since."""
    if _is_refused(future):
        return future.cancelled() or not isinstance(future.exception(), BadRequestError)
    return bool(future.result().failure)


def _size(spec: GrammarSpec, future: Future[CompiledGrammar]) -> int:
    if not future.done() or future.cancelled():
        return 0
    return len(spec.text) + (_REFUSED_BYTES if _is_refused(future) else future.result().num_bytes)
