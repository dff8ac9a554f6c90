"""What a child process reports once it can work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

FINISH_S = 5.0
"""How long a process of the server may go on after it was stopped, to finish what would be lost otherwise."""


class Ready(Protocol):
    """Reports readiness, once.

    max_model_len: prompt and answer of one request together, in tokens, as the scheduler found it; others report none.
    before_end: called when the launcher stops this process, in another thread, before it ends; for `FINISH_S` at most.
    """

    def __call__(self, *, max_model_len: int = 0, before_end: Callable[[], None] | None = None) -> None: ...
