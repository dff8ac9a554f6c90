"""Child processes that report when they are ready, die with their parent, and whose death is noticed.

Parent and child share one pipe. The child sends a single JSON message through it, "ready" or "error", and then only
listens: end of file means that the parent stopped the child, or is gone itself, however that came about. The child
ignores SIGINT and SIGTERM, which terminals and service managers send to the whole group: the parent decides when a
child may go, after the running requests.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeAlias

from vlmserve.common.errors import EngineError, VlmserveError
from vlmserve.engine_args import EngineArgs
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.logs import configure_logging
from vlmserve.ipc.ready import Ready, ReadyInfo

logger = logging.getLogger(__name__)

ChildMain: TypeAlias = Callable[[EngineArgs, Channels, Ready], None]
"""A child's work: calls `ready` once, then never returns. Must be importable by name in a fresh interpreter."""

_STOP_PATIENCE_S = 2.0
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A started child. Make it in the main thread, and `stop` it whatever happens."""

    def __init__(self, name: str, main: ChildMain, args: EngineArgs, channels: Channels, *, log_level: str) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take along the parent's threads and sockets
        self.name = name
        self._pipe, theirs = context.Pipe(duplex=True)
        self._process = context.Process(
            target=_run_child, name=name, args=(name, main, args, channels, theirs, log_level, os.getpid())
        )
        self._process.start()
        theirs.close()

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the child has died."""
        return self._process.sentinel

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    def how_it_died(self) -> str:
        """One clause for a log line."""
        self._process.join(timeout=1.0)
        code = self._process.exitcode
        if code is None:
            return f"the {self.name} process closed its pipe"
        if code < 0:
            return f"the {self.name} process was killed by {signal.Signals(-code).name}"
        return f"the {self.name} process ended with status {code}"

    def stop(self) -> None:
        """End the child now, in order if it can, by force if not."""
        self._pipe.close()
        self._process.join(timeout=_STOP_PATIENCE_S)
        if self._process.is_alive():
            logger.warning("the %s process does not stop: killing it", self.name)
            self._process.kill()
            self._process.join()

    def _take_report(self) -> ReadyInfo:
        try:
            report = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise EngineError(f"{self.how_it_died()} while starting") from None
        if "error" in report:
            raise EngineError(report["error"])
        return ReadyInfo(**report["ready"])


def wait_until_ready(children: Sequence[ChildProcess], timeout_s: float) -> dict[str, ReadyInfo]:
    """Every child's report, by name. Raises EngineError with the child's own message if one fails, or by timeout."""
    waiting = {child._pipe: child for child in children}
    reports: dict[str, ReadyInfo] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        readable = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not readable:
            late = ", ".join(child.name for child in waiting.values())
            raise EngineError(f"not ready after {timeout_s:g} s: {late}; --startup-timeout-s allows more")
        for pipe in readable:
            child = waiting.pop(pipe)  # type: ignore[call-overload]
            reports[child.name] = child._take_report()
    return reports


def _run_child(
    name: str, main: ChildMain, args: EngineArgs, channels: Channels, pipe: Connection, log_level: str, parent: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent(parent)
    threading.Thread(target=_exit_with_pipe, args=(pipe,), name="parent-watch", daemon=True).start()
    configure_logging(log_level, name)
    is_ready = False

    def ready(info: ReadyInfo) -> None:
        nonlocal is_ready
        is_ready = True
        pipe.send_bytes(json.dumps({"ready": dataclasses.asdict(info)}).encode())

    try:
        main(args, channels, ready)
        message = "returned"
    except Exception as error:
        expected = isinstance(error, VlmserveError) and not is_ready
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        if not expected or log_level == "debug":
            logger.exception("%s failed", name)
    if not is_ready:
        pipe.send_bytes(json.dumps({"error": message if message != "returned" else f"{name} stopped early"}).encode())
    else:
        logger.error("%s stopped: %s", name, message)
    # Not sys.exit: threads of a broken engine must not keep the process, and with it the server, half alive.
    sys.stderr.flush()
    os._exit(1)


def _exit_with_pipe(pipe: Connection) -> None:
    try:
        while True:
            pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux): also when the watching thread cannot run."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
