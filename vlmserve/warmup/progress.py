"""How far a run is, for people: a line that is written over on a terminal, and one every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from vlmserve.messages import EncodedItem

_ON_TERMINAL_S, _ELSEWHERE_S = 0.1, 5.0


@dataclass
class Tally:
    """Of sources, but for the last three.

    total: to be done; done: on disk now, or cached by a server without one; skipped: finished by a run before; failed.
    ignored: files in folders that are neither pictures nor videos. encoded, found: temporal patches that were computed
    and that were cached. patches_encoded: the first in vision patches.
    """

    total: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    ignored: int = 0
    encoded: int = 0
    found: int = 0
    patches_encoded: int = 0

    def add(self, items: Sequence[EncodedItem]) -> None:
        """A source is done."""
        self.done += 1
        for item in items:
            self.encoded += item.encoded
            self.found += item.found
            self.patches_encoded += item.patches_encoded


class Progress:
    """Shows a tally that others change."""

    def __init__(self, tally: Tally, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._tally = tally
        self._out = out
        self._clock = clock
        self._terminal = out.isatty()
        self._started = self._shown = clock()
        self._width = 0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._started

    def show(self) -> None:
        """To be called often; writes now and then."""
        now = self._clock()
        if now - self._shown >= (_ON_TERMINAL_S if self._terminal else _ELSEWHERE_S):
            self._shown = now
            self._write()

    def finish(self) -> None:
        """Clear the way for what is printed next."""
        if self._terminal and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._out, flush=True)

    def _write(self) -> None:
        tally = self._tally
        seconds = max(self.seconds, 1e-9)
        finished = tally.done + tally.skipped + tally.failed
        text = (
            f"{finished}/{tally.total}, {tally.done / seconds:.1f} items/s, {tally.patches_encoded / seconds:.0f} "
            f"patches/s, {tally.found} hits, {tally.failed} errors"
        )
        if not self._terminal:
            print(f"warmup: {text}", file=self._out, flush=True)
            return
        print("\r" + text.ljust(self._width), end="", file=self._out, flush=True)
        self._width = len(text)


def summary(tally: Tally, seconds: float, notes: Sequence[str], *, interrupted: bool) -> dict[str, Any]:
    """Everything about a run, for JSON."""
    return {**asdict(tally), "seconds": round(seconds, 3), "interrupted": interrupted, "notes": list(notes)}


def describe(tally: Tally, seconds: float) -> str:
    """The same as a line for people."""
    text = f"{tally.done} of {tally.total} done in {seconds:.1f} s"
    if tally.skipped:
        text += f", {tally.skipped} finished before"
    if tally.failed:
        text += f", {tally.failed} failed"
    text += f"; temporal patches: {tally.encoded} encoded ({tally.patches_encoded} vision patches), {tally.found} found"
    if tally.ignored:
        text += f"; files that are neither pictures nor videos: {tally.ignored}"
    return text
