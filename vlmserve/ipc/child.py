"""The processes of a server as children of its launcher: their start, their work, and their report (`Ready`)."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from typing import TypeAlias

from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.ipc.channels import Channels
from vlmserve_common.errors import EngineError
from vlmserve_common.process.child import STOP_PATIENCE_S, ChildProcess, Parent

FINISH_S = 5.0
"""The time that a stopped process of the server has to save its state."""
STACKS_SIGNAL = signal.SIGUSR2
"""The signal that makes a child write all threads' stacks to the log, even while native code runs."""
LAST_WORDS_S = 3 * STOP_PATIENCE_S
"""The time that a child may take, after `StartSettings.ready_by`, to end its own children and to say so."""


@dataclass(frozen=True, kw_only=True)
class ReadyReport:
    """The report of a child that is ready. Only the scheduler has something to say in it.

    max_model_len: prompt and answer of one request together, in tokens. auto_pixels: the value of `--max-pixels auto`,
    in pixels; None: the checkpoint's own limit.
    """

    max_model_len: int = 0
    auto_pixels: int | None = None


def of_all(reports: Iterable[ReadyReport]) -> ReadyReport:
    """Return the limits that hold for every process: the smallest of each figure reported."""
    reports = list(reports)
    pixels = [report.auto_pixels for report in reports if report.auto_pixels is not None]
    return ReadyReport(
        max_model_len=min((report.max_model_len for report in reports if report.max_model_len), default=0),
        auto_pixels=min(pixels, default=None),
    )


class Ready:
    """Reports readiness to the launcher, once. max_model_len, auto_pixels: see `ReadyReport`.

    before_end: called when the launcher stops this process, in another thread, before it ends; for `FINISH_S` at most.
    """

    def __init__(self, parent: Parent) -> None:
        self._parent = parent

    def __call__(
        self,
        *,
        max_model_len: int = 0,
        auto_pixels: int | None = None,
        before_end: Callable[[], None] | None = None,
    ) -> None:
        if before_end is not None:
            self._parent.before_end = before_end
        self._parent.ready(asdict(ReadyReport(max_model_len=max_model_len, auto_pixels=auto_pixels)))


ChildMain: TypeAlias = Callable[[EngineArgs, Channels, StartSettings, Ready], None]
"""A child's work: calls `ready` once, then never returns. Must be importable by name in a fresh interpreter."""


def start_child(name: str, main: ChildMain, args: EngineArgs, channels: Channels, start: StartSettings) -> ChildProcess:
    """Start a process of the server; see `ChildProcess` for how. name: without the replica."""
    replica = channels.replica
    return ChildProcess(
        name if replica is None else f"r{replica}-{name}",
        _run,
        (main, args, channels, start),
        title=f"the {name} process" + ("" if replica is None else f" of replica {replica}"),
        log_level=start.log_level,
        stop_patience_s=FINISH_S + STOP_PATIENCE_S,
        forked=True,
    )


def wait_until_ready(
    children: Sequence[ChildProcess], start: StartSettings, *, grace_s: float = 0.0
) -> dict[str, ReadyReport]:
    """Wait for every child's report, by name. Raises EngineError with the child's own message if one fails, or by
    timeout.

    grace_s: for messages of failure that come once the time is over.
    """
    waiting = {child.pipe: child for child in children}
    reports: dict[str, ReadyReport] = {}
    deadline = start.ready_by + grace_s
    while waiting:
        readable = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not readable:
            late = ", ".join(child.name for child in waiting.values())
            raise EngineError(f"not ready after {start.startup_timeout_s:g} s: {late}; --startup-timeout-s allows more")
        for pipe in readable:
            child = waiting.pop(pipe)  # type: ignore[call-overload]
            reports[child.name] = ReadyReport(**child.take_report())
    return reports


def _run(parent: Parent, main: ChildMain, args: EngineArgs, channels: Channels, start: StartSettings) -> None:
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    main(args, channels, start, Ready(parent))
