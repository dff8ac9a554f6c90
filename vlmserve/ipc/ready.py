"""What a child process reports once it can work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

FINISH_S = 5.0
"""How long a process of the server may go on after it was stopped, to finish what would be lost otherwise."""


@dataclass(frozen=True, kw_only=True)
class ReadyReport:
    """What the scheduler found out; others have nothing to say.

    max_model_len: prompt and answer of one request together, in tokens. auto_pixels: what `--max-pixels auto` comes to,
    in pixels; None: the checkpoint's own limit.
    """

    max_model_len: int = 0
    auto_pixels: int | None = None


def of_all(reports: Iterable[ReadyReport]) -> ReadyReport:
    """What holds for every process: of each figure the smallest one that was reported."""
    reports = list(reports)
    pixels = [report.auto_pixels for report in reports if report.auto_pixels is not None]
    return ReadyReport(
        max_model_len=min((report.max_model_len for report in reports if report.max_model_len), default=0),
        auto_pixels=min(pixels, default=None),
    )


class Ready(Protocol):
    """Reports readiness, once. max_model_len, auto_pixels: see `ReadyReport`.

    before_end: called when the launcher stops this process, in another thread, before it ends; for `FINISH_S` at most.
    """

    def __call__(
        self,
        *,
        max_model_len: int = 0,
        auto_pixels: int | None = None,
        before_end: Callable[[], None] | None = None,
    ) -> None: ...
