"""The processes of a server as children of its launcher: what they run, and what they report (`ReadyInfo`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TypeAlias

from vlmserve.common.child import STOP_PATIENCE_S, ChildProcess, Parent
from vlmserve.common.errors import EngineError
from vlmserve.engine_args import EngineArgs
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.ready import FINISH_S, Ready, ReadyInfo

ChildMain: TypeAlias = Callable[[EngineArgs, Channels, Ready], None]
"""A child's work: calls `ready` once, then never returns. Must be importable by name in a fresh interpreter."""


def start_child(name: str, main: ChildMain, args: EngineArgs, channels: Channels, *, log_level: str) -> ChildProcess:
    """Start a process of the server; see `ChildProcess` for how."""
    return ChildProcess(
        name,
        _run,
        (main, args, channels),
        title=f"the {name} process",
        log_level=log_level,
        stop_patience_s=FINISH_S + STOP_PATIENCE_S,
    )


def wait_until_ready(children: Sequence[ChildProcess], timeout_s: float) -> dict[str, ReadyInfo]:
    """Every child's report, by name. Raises EngineError with the child's own message if one fails, or by timeout."""
    waiting = {child.pipe: child for child in children}
    reports: dict[str, ReadyInfo] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        readable = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not readable:
            late = ", ".join(child.name for child in waiting.values())
            raise EngineError(f"not ready after {timeout_s:g} s: {late}; --startup-timeout-s allows more")
        for pipe in readable:
            child = waiting.pop(pipe)  # type: ignore[call-overload]
            reports[child.name] = ReadyInfo(**child.take_report())
    return reports


def _run(parent: Parent, main: ChildMain, args: EngineArgs, channels: Channels) -> None:
    def ready(info: ReadyInfo, *, before_end: Callable[[], None] | None = None) -> None:
        if before_end is not None:
            parent.before_end = before_end
        parent.ready(dataclasses.asdict(info))

    main(args, channels, ready)
