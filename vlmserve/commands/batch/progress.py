"""The progress of a run: a live display on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

if TYPE_CHECKING:
    from rich.live import Live

_LOOK_EVERY_S, _ON_TERMINAL_S, _ELSEWHERE_S = 0.1, 0.2, 10.0
_RATE_OVER_S = 60.0


@dataclass(kw_only=True)
class RunTally:
    """The counts of a run.

    total: items counted so far; counted: the count is complete. done: items that this run finished by computing.
    skipped: items that an earlier run finished. failed: items that failed in this run.
    """

    total: int = 0
    counted: bool = False
    done: int = 0
    skipped: int = 0
    failed: int = 0
    unit: ClassVar[str]

    @property
    def passed(self) -> int:
        """The number of items that need no more work."""
        return self.worked_on + self.skipped

    @property
    def worked_on(self) -> int:
        """The number of items that this run finished or failed."""
        return self.done + self.failed

    @property
    def hits(self) -> int:
        """The number of results that were there already."""
        raise NotImplementedError

    @property
    def work(self) -> int:
        """The work done, in `unit`."""
        raise NotImplementedError


def phrases(*counts: tuple[int, str]) -> list[str]:
    """Return the phrases of a summary for the counts that are not 0."""
    return [f"{count} {what}" for count, what in counts if count]


class RunProgress:
    """Shows a tally while the run changes it. A context manager. name: of the command.

    rich draws it on a terminal, if installed.
    """

    def __init__(self, name: str, tally: RunTally, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._tally = tally
        self._out = out
        self._clock = clock
        self._begin()
        self._live = _make_live(out) if out.isatty() else None

    def _begin(self) -> None:
        self._started = self._shown = self._clock()
        self._marks: deque[tuple[float, int, int]] = deque([(self._started, 0, 0)])

    @property
    def seconds(self) -> float:
        """The time since the beginning."""
        return self._clock() - self._started

    def __enter__(self) -> Self:
        self._begin()
        if self._live is not None:
            self._live.start()
            self._log_to(self._out, sys.stderr)  # so that log lines go above the display
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._log_to(sys.stderr, self._out)
            self._live.update("")
            self._live.stop()

    def _log_to(self, before: TextIO, now: TextIO) -> None:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(now)

    async def keep_shown(self) -> None:
        """Show the progress until cancelled."""
        while True:
            self.show()
            await asyncio.sleep(_LOOK_EVERY_S)

    def show(self) -> None:
        """Write a line or redraw, if it is time to."""
        now = self._clock()
        if now - self._shown < (_ON_TERMINAL_S if self._live is not None else _ELSEWHERE_S):
            return
        self._shown = now
        tally = self._tally
        self._marks.append((now, tally.worked_on, tally.work))
        while len(self._marks) > 2 and now - self._marks[1][0] > _RATE_OVER_S:
            self._marks.popleft()
        if self._live is not None:
            self._live.update(self._drawn(), refresh=True)
        else:
            print(f"{self._name}: {self.line()}", file=self._out, flush=True)

    def line(self) -> str:
        """Return the progress as one line."""
        tally = self._tally
        then, items, work = self._marks[0]  # a minute ago
        seconds = max(self._clock() - then, 1e-9)
        items_s, work_s = (tally.worked_on - items) / seconds, (tally.work - work) / seconds
        total = f"{tally.total}" if tally.counted else f"{tally.total}+" if tally.total else "?"
        parts = [f"{tally.passed}/{total}", f"{items_s:.1f} items/s", f"{work_s:.0f} {tally.unit}/s"]
        left = tally.total - tally.passed
        if tally.counted and items_s > 0 and left >= 0:
            parts.append(f"ETA {_clock_time(left / items_s)}")
        parts += [f"{tally.hits} cache hits", f"{tally.failed} failures"]
        if tally.skipped:
            parts.append(f"{tally.skipped} finished before")
        return ", ".join(parts)

    def _drawn(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        tally = self._tally
        total = tally.total if tally.counted else None
        table = Table.grid(expand=True)
        table.add_row(ProgressBar(total, tally.passed, pulse=total is None, animation_time=self._clock()))
        table.add_row(Text(self.line(), overflow="fold"))
        return table


def _make_live(out: TextIO) -> Live | None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    return Live(console=Console(file=out), auto_refresh=False, transient=True, redirect_stdout=False)


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
