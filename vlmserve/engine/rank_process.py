"""A rank as a process: of a server, whose launcher looks after it, or of an engine that has no other processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from processors.pool import prepare_processes
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.ranks import follow
from vlmserve_common.errors import EngineError
from vlmserve_common.parallel.meeting import MeetingPlace
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.stop_signals import stop_signals_held


def run_rank(parent: Parent, args: EngineArgs, rank: int, place: MeetingPlace) -> None:
    """A child's work."""
    follow(args, rank, place, ready=lambda: parent.ready({}))


class RankProcesses:
    """All ranks but the first, as children of this process. To be stopped whatever happens."""

    def __init__(self, args: EngineArgs, place: MeetingPlace, log_level: str) -> None:
        prepare_processes()
        self._place = place
        self._children: list[ChildProcess] = []
        self._starting: list[ChildProcess] = []
        for rank in args.own_ranks[1:]:
            with stop_signals_held():
                child = ChildProcess(
                    f"rank-{rank}",
                    run_rank,
                    (args, rank, place),
                    title=f"the process of rank {rank}",
                    log_level=log_level,
                    forked=True,
                )
                self._children.append(child)
            self._starting.append(child)

    def check(self, timeout_s: float = 0.0) -> None:
        """EngineError with the message of one that cannot start, or is gone. timeout_s: for one to say something."""
        for pipe in wait([child.pipe for child in self._starting], timeout_s):
            child = next(one for one in self._starting if one.pipe is pipe)
            child.take_report()
            self._starting.remove(child)
        died = self.who_died()
        if died is not None:
            raise EngineError(died)

    def wait_ready(self) -> None:
        """Until all can work. Errors: those of `check`, and EngineError when the time is over."""
        while self._starting:
            if time.monotonic() > self._place.ready_by:
                late = ", ".join(child.title for child in self._starting)
                raise EngineError(f"not ready after {self._place.timeout_s:g} s: {late}")
            self.check(timeout_s=0.1)

    def who_died(self, timeout_s: float = 0.0) -> str | None:
        """Which one is gone and how, None if all are there. timeout_s: for one to end."""
        gone: Sequence[object] = wait([child.sentinel for child in self._children], timeout_s)
        return next((child.how_it_died() for child in self._children if child.sentinel in gone), None)

    def stop(self) -> None:
        """End them."""
        for child in self._children:
            child.stop()
