"""Threads for one kind of work, so that it holds up no other kind; the end of a process whose threads do not end."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
logger = logging.getLogger(__name__)
_unwanted: ContextVar[threading.Event | None] = ContextVar("_unwanted", default=None)


class UnwantedError(Exception):
    """The caller of a thread's work was cancelled."""


def check_wanted() -> None:
    """Raise UnwantedError in a thread of `Threads` whose caller was cancelled. Long loops call this now and then."""
    event = _unwanted.get()
    if event is not None and event.is_set():
        raise UnwantedError


class Threads:
    """At most `count` threads, which start when they are needed. Their names begin with `name`."""

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in one of the threads. If this is cancelled, the work is unwanted: it does not begin, or it
        is waited for, so that nothing of it happens afterwards."""
        unwanted, context = threading.Event(), copy_context()
        context.run(_unwanted.set, unwanted)
        work = self._executor.submit(context.run, partial(function, *args, **kwargs))
        result = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            unwanted.set()
            if not work.cancel():
                await asyncio.wait((result,))
            raise

    def close(self) -> None:
        """Begin no more work. Work under way goes on."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def exit_within(seconds: float, status: int) -> None:
    """End this process with a status in `seconds` at the latest. Call it last: Python's own end has no limit, since it
    waits for every thread that is no daemon."""

    def exit_now() -> None:
        others = (each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread())
        logger.warning("ending without these threads, which still work: %s", ", ".join(each.name for each in others))
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    timer = threading.Timer(seconds, exit_now)
    timer.daemon = True
    timer.start()
