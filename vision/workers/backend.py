"""Where batches of temporal patches are encoded: in this process (`inline`), or in others (`process_backend`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from vision.towers.temporal_patch import EncodeBatch

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeResult:
    """embeds: of each temporal patch in order, [h * w / merge**2, width] in the tower's dtype, each with memory of
    its own; None: error says why not.

    untried: the worker was gone before it came to this batch, which therefore cannot be what ended it; or the batch was
    cancelled.
    """

    number: int
    embeds: tuple[torch.Tensor, ...] | None
    error: str = ""
    untried: bool = False


class EncoderBackend(Protocol):
    """Workers that encode batches. Every started batch gives one result, unless the backend is closed before.

    One thread calls all but `work`, which is for the device's thread; that may be the same one.
    """

    def workers(self) -> Sequence[int]:
        """Ids of the usable workers; one that was given up is not among them."""
        ...

    def start(self, worker: int, batch: EncodeBatch) -> None:
        """Let a worker encode a batch after those it was given before. Never blocks, and raises nothing about a batch:
        that comes as its result."""
        ...

    def cancel(self, worker: int, number: int) -> None:
        """Nobody wants a started batch any more: what is not computed yet may be left."""
        ...

    def collect(self) -> list[EncodeResult]:
        """What has finished, failed or been cancelled since. Never blocks, never computes."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether batches wait for `work`; never where workers compute by themselves."""
        ...

    def work(self, budget_s: float) -> bool:
        """Compute for about so many seconds, at least one piece if there is any; whether there was one. Infinity: all
        there is."""
        ...

    def wait_handles(self) -> Sequence[int]:
        """File descriptors that are readable when `collect` has something; none: whatever is out waits for `work`."""
        ...

    def close(self) -> None:
        """End the workers. May be called again."""
        ...


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
