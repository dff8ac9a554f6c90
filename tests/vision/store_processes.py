"""What processes of their own do with an embedding store, for tests that watch, limit or kill them."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from tests.vision.store_helpers import holds, key, open_store, rows

# One process imports torch; each worker is a copy of it.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.vision.store_processes"])


@contextmanager
def worker(function, *args) -> Iterator[tuple[object, Connection]]:
    """A process that runs function(connection, *args), and the other end of its connection."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_run, args=(function, theirs, args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def received(connection: Connection) -> list:
    """All that comes until the other end is closed."""
    messages = []
    try:
        while True:
            messages.append(connection.recv())
    except EOFError:
        return messages


def put_for_ever(connection: Connection, folder: Path, first: int, width: int, at: int) -> None:
    """Entry after entry; each one's number is sent when it is on disk. The process is killed at its `at`th write (half
    of which is done), flush or rename."""
    write = os.write
    calls = 0

    def count(name: str) -> None:
        function = getattr(os, name)

        def counted(*args):
            nonlocal calls
            calls += 1
            if calls == at:
                if function is write:
                    write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        setattr(os, name, counted)

    for name in ("write", "fsync", "replace"):
        count(name)
    store = open_store(folder)
    for number in range(first, first + 1000):
        if store.put(key(number), rows(number, width=width), pin=number % 5 == 0):
            connection.send(number)


def use(connection: Connection, folder: Path, seed: int, limit: int, numbers: int, times: int) -> None:
    """Look for entries and put those that are missing; sends what it counted, and what it warned of."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("vision").addHandler(handler)
    store = open_store(folder, limit=limit)
    random = Random(seed)
    connection.send("ready")
    connection.recv()
    for _ in range(times):
        number = int(random.triangular(0, numbers, 0))
        if not holds(store, number):
            assert store.put(key(number), rows(number), pin=number < 3)
    connection.send(store.stats())
    for text in warnings:
        connection.send(text)


def _run(function, connection: Connection, args: tuple) -> None:
    try:
        function(connection, *args)
    except BaseException:
        connection.send(traceback.format_exc())
    finally:
        connection.close()
