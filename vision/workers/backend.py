"""Where batches of temporal patches are encoded: in this process (here), or in others (`process_backend`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import EncodeBatch

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeResult:
    """embeds: of each temporal patch in order, [h * w / merge**2, width] in the tower's dtype, each with memory of
    its own; None: error says why not.

    untried: the worker was gone before it came to this batch, which therefore cannot be what ended it.
    """

    number: int
    embeds: tuple[torch.Tensor, ...] | None
    error: str = ""
    untried: bool = False


class EncoderBackend(Protocol):
    """Workers that encode batches. Every started batch gives one result, unless the backend is closed before."""

    def workers(self) -> Sequence[int]:
        """Ids of the usable workers; one that was given up is not among them."""
        ...

    def start(self, worker: int, batch: EncodeBatch) -> None:
        """Let a worker encode a batch after those it was given before. Never blocks, and raises nothing about a batch:
        that comes as its result."""
        ...

    def collect(self) -> list[EncodeResult]:
        """What has finished or failed since. Never blocks, but for the inline backend, which runs a started batch."""
        ...

    def wait_handles(self) -> Sequence[int]:
        """File descriptors that are readable when `collect` has something; none: call it whenever batches are out."""
        ...

    def close(self) -> None:
        """End the workers. May be called again."""
        ...


class InlineBackend:
    """One worker, number 0: this thread, whenever it collects."""

    def __init__(self, runner: TowerRunner) -> None:
        self._runner = runner
        self._started: deque[EncodeBatch] = deque()

    def workers(self) -> Sequence[int]:
        """See `EncoderBackend`."""
        return (0,)

    def start(self, worker: int, batch: EncodeBatch) -> None:
        """See `EncoderBackend`."""
        self._started.append(batch)

    def collect(self) -> list[EncodeResult]:
        """Run the batch that was started first; nothing when there is none. A failure is its result."""
        if not self._started:
            return []
        batch = self._started.popleft()
        embeds, error = attempt(lambda: self._runner.encode(batch.patches))
        return [EncodeResult(number=batch.number, embeds=embeds, error=error)]

    def wait_handles(self) -> Sequence[int]:
        """None: see `EncoderBackend`."""
        return ()

    def close(self) -> None:
        """Forget what was started."""
        self._started.clear()


def attempt(run: Callable[[], _T]) -> tuple[_T | None, str]:
    """What `run` returns, or None and "Type: message" of what it raised. Out of GPU memory, all that is cached is given
    back, so that the next and smaller batch finds room."""
    try:
        return run(), ""
    except Exception as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        message = f"{type(error).__name__}: {error}"
    # not above: until then the error's traceback keeps the tensors of the failed batch
    if out_of_memory:
        torch.cuda.empty_cache()
    return None, message
