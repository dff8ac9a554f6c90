"""SIGINT and SIGTERM, by which people and service managers stop a command."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """A stop signal came inside `stop_signals_raise`."""


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Raise StopRequested in the main thread at the first stop signal; call this in the main thread.

    Later signals are ignored, so that they cannot interrupt the work that the first one started.
    """

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
    """Make SIGTERM raise SystemExit, as SIGINT raises KeyboardInterrupt, so that the process cleans up.

    Does nothing outside the main thread, the only one that can handle signals.
    """
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
    """Block stop signals in this thread, and in the processes that it starts meanwhile until they ignore them."""
    from multiprocessing import resource_tracker  # 20 ms that commands without children need not take

    resource_tracker.ensure_running()  # starting it inside, as the first child would, lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on. Call it in the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
