"""How much of a warmup is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vlmserve.ipc.messages import EncodedItem


@dataclass
class Tally:
    """Of inputs, but for the last four.

    total: to be done, as far as they have been counted; counted: whether that is all of them. done: on disk now, or
    cached by a server without one; skipped: finished by a run before; failed. encoded, found: temporal patches that
    were computed and that were cached. patches_encoded: the first in vision patches. ignored: files in folders that are
    neither pictures nor videos.
    """

    total: int = 0
    counted: bool = False
    done: int = 0
    skipped: int = 0
    failed: int = 0
    encoded: int = 0
    found: int = 0
    patches_encoded: int = 0
    ignored: int = 0
    unit: ClassVar[str] = "patches"

    @property
    def passed(self) -> int:
        """Inputs that need no more attention."""
        return self.done + self.skipped + self.failed

    @property
    def worked_on(self) -> int:
        """Inputs that this run has finished, for better or worse."""
        return self.done + self.failed

    @property
    def hits(self) -> int:
        """Temporal patches that were cached."""
        return self.found

    @property
    def work(self) -> int:
        """Vision patches that were computed."""
        return self.patches_encoded

    def add(self, items: Sequence[EncodedItem]) -> None:
        """An input is done."""
        self.done += 1
        for item in items:
            self.encoded += item.encoded
            self.found += item.found
            self.patches_encoded += item.patches_encoded

    def describe(self, seconds: float) -> str:
        """All of it as a line for people."""
        told = ((self.skipped, "finished before"), (self.failed, "failed"))
        text = ", ".join(
            [f"{self.done} of {self.total} done in {seconds:.1f} s", *(f"{n} {what}" for n, what in told if n)]
        )
        text += (
            f"; temporal patches: {self.encoded} encoded ({self.patches_encoded} vision patches), {self.found} found"
        )
        if self.ignored:
            text += f"; files that are neither pictures nor videos: {self.ignored}"
        return text
