"""SIGINT and SIGTERM, by which people and service managers stop a command."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """One of them came, while `stop_signals_raise`."""


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Have the first of them raise StopRequested in the main thread, where this is to be called. Those that follow are
    ignored: they must not break off what the first one has set going."""

    def stop(number: int, frame: object) -> None:
        for other in STOP_SIGNALS:
            signal.signal(other, lambda *_: None)  # SIG_IGN would have Python complain of one that is on its way
        raise StopRequested(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Have SIGTERM end the process by SystemExit, as SIGINT does by KeyboardInterrupt, so that it clears away what it
    made. Nothing in other threads than the main one, which cannot have signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Keep them from this thread, and from birth on from the processes that it starts meanwhile: their interpreters
    must not see them before they ignore them."""
    from multiprocessing import resource_tracker  # 20 ms that commands without children need not take

    resource_tracker.ensure_running()  # starting it inside, as the first child would, lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """From here on. Call it in the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
