"""The interface of encoder workers in this process (`inline`) or in other ones (`process_backend`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from vision.towers.temporal_patch import EncodeBatch
from vlmserve_common.checkpoint.weight_source import WeightSource

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeResult:
    """The result of a batch.

    `embeds`: of each temporal patch in order, [h * w / merge**2, width] in the tower's dtype, each with memory of its
    own. If it is None, `error` gives the reason. `untried`: the worker had gone before it came to this batch, which
    therefore cannot have ended it; or the batch was cancelled.
    """

    number: int
    embeds: tuple[torch.Tensor, ...] | None
    error: str = ""
    untried: bool = False


class EncoderBackend(Protocol):
    """Workers that encode batches. Every started batch gives one result, unless the backend is closed first.

    One thread calls all methods except `work`. `work` belongs to the device's thread, which may be the same one.

    takes_turns: whether nothing else is computed on the device during `work`.
    """

    takes_turns: bool

    def workers(self) -> Sequence[int]:
        """Return the ids of the usable workers, without those given up."""

    def start(self, worker: int, batch: EncodeBatch) -> None:
        """Let a worker encode a batch after its earlier ones. Never blocks. A batch's errors come as its result."""

    def cancel(self, worker: int, number: int) -> None:
        """Allow a worker to drop the rest of a started batch that is no longer wanted."""

    def collect(self) -> list[EncodeResult]:
        """Return the results of batches that have finished, failed or been cancelled since. Never blocks, never
        computes."""

    @property
    def has_work(self) -> bool:
        """Whether batches wait for `work`. Always False if workers compute by themselves."""

    def work(self, budget_s: float) -> bool:
        """Compute for about so many seconds, and at least one piece if there is any; return True if there was one.

        Infinity computes everything.
        """

    def write_tower(self, source: WeightSource) -> None:
        """Write other weights into the towers of other processes, in place, when no batch is under way. Blocks. Raises
        EngineError if a tower is not as it should be."""

    def wait_handles(self) -> Sequence[int]:
        """Return file descriptors that are readable when `collect` has something. None: all batches wait for `work`."""

    def close(self) -> None:
        """End the workers. Can be called again."""


def attempt(run: Callable[[], _T]) -> tuple[_T | None, str]:
    """Return the result of `run`, or None and "Type: message" of its exception.

    After running out of GPU memory, torch's cached memory is freed, so that the next and smaller batch finds room.
    """
    try:
        return run(), ""
    except Exception as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        message = f"{type(error).__name__}: {error}"
    # not above: until then the error's traceback keeps the tensors of the failed batch
    if out_of_memory:
        torch.cuda.empty_cache()
    return None, message
