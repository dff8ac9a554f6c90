"""SIGINT and SIGTERM, by which people and service managers stop a command."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


_AGAIN_S = 0.01
T = TypeVar("T")


class StopRequested(KeyboardInterrupt):
    """A stop signal came inside `stop_signals_raise`. As KeyboardInterrupt, it goes through an event loop's
    callbacks."""


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Raise StopRequested in the main thread at the first stop signal; call this in the main thread.

    Later signals are ignored, so that they cannot interrupt the work that the first one started. Python passes over
    what is raised in finalizers and callbacks of weak references. Then the signal comes again, unless the block ends
    first.
    """
    requested, report, main = False, sys.unraisablehook, threading.main_thread()
    timers: list[threading.Timer] = []

    def stop(number: int, frame: object) -> None:
        nonlocal requested
        if not requested:
            requested = True
            raise StopRequested(signal.Signals(number).name)

    def again(number: int) -> None:
        nonlocal requested
        requested = False  # in the hook, the next signal would be passed over, too
        assert main.ident is not None
        signal.pthread_kill(main.ident, number)

    def passed_over(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, StopRequested):
            report(what)
            return
        timers.append(threading.Timer(_AGAIN_S, again, (signal.Signals[str(what.exc_value)],)))
        timers[-1].start()

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    sys.unraisablehook = passed_over
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)


def made_whole(make: Callable[[], T]) -> T:
    """Return what `make` makes. In the main thread, a stop signal meanwhile takes effect when it is made."""
    if threading.current_thread() is not threading.main_thread():
        return make()
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOP_SIGNALS}
    try:
        return make()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


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
