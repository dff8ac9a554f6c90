"""The grammars that requests wait for, and a cache of compiled ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar.compile_process import CompileProcess
from vlmserve.scheduler.grammar.matcher import CompiledGrammar
from vlmserve_common.errors import BadRequestError

_REFUSED_BYTES = 1024
"""The size that a refused grammar counts in the cache, besides its text."""


@dataclass(slots=True)
class _Entry:
    future: Future[CompiledGrammar]
    holders: int = 0


class GrammarQueue:
    """Compiles grammars in threads of its own. One thread calls `get`, `release` and `close`.

    make: makes the compiler of each of `workers` threads, when it is needed. cache_bytes: most memory for compiled
    grammars and refused texts; the least recently used go first. A refused grammar is not tried again.
    """

    def __init__(self, make: Callable[[], CompileProcess], *, cache_bytes: int, workers: int = 2) -> None:
        self._make = make
        self._cache_bytes = cache_bytes
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._own = threading.local()
        self._compilers: list[CompileProcess] = []

    def get(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Return the future of a compiled grammar (or its BadRequestError), one for all requests with this grammar.
        Call `release` for it."""
        entry = self._entries.get(spec)
        if entry is None or (entry.future.done() and _is_accident(entry.future)):
            holders = entry.holders if entry else 0  # who saw the accident releases, too
            entry = self._entries[spec] = _Entry(self._threads.submit(self._compile, spec), holders)
        entry.holders += 1
        self._entries.move_to_end(spec)
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
        """End the compilers, even in the middle of a grammar."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for compiler in self._compilers:
            compiler.close()

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if not hasattr(self._own, "compiler"):
            self._own.compiler = self._make()
            self._compilers.append(self._own.compiler)
        return self._own.compiler.compile(spec)

    def _trim(self) -> None:
        size = self.cached_bytes
        for spec in [spec for spec, entry in self._entries.items() if not entry.holders and entry.future.done()]:
            if size <= self._cache_bytes:
                return
            size -= _size(spec, self._entries.pop(spec).future)


def _is_accident(future: Future[CompiledGrammar]) -> bool:
    return future.cancelled() or not isinstance(future.exception(), BadRequestError | type(None))


def _size(spec: GrammarSpec, future: Future[CompiledGrammar]) -> int:
    if not future.done() or future.cancelled():
        return 0
    text = len(spec.text)
    return text + (future.result().num_bytes if future.exception() is None else _REFUSED_BYTES)
