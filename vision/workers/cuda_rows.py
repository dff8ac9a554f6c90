"""Copies rows from one process's GPU memory to another's by CUDA IPC: `share` in the worker, `CudaBorrower` in the
engine.

Written by torch's documentation and source; it has not been run on a GPU. The handles are the ones that torch's
multiprocessing pickles (`torch.multiprocessing.reductions`); here they are plain fields of a message. While a handle is
out, torch counts in a small file in shared memory whether the other side has it open. The worker must also keep the
rows (`vision.workers.encoder_messages`) until it is told that they were taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from vision.workers.encoder_messages import TRIAL_ROWS, TRIAL_WIDTH, RowsHandle
from vlmserve_common.compute.tensors import dtype_name

_SHARED_MEMORY = Path("/dev/shm")
# Fields of a `RowsHandle` that torch gives and takes, in its order.
_STORAGE = ("device", "memory", "nbytes", "offset", "counter", "counter_offset", "event", "event_sync")


def share(rows: torch.Tensor, row_counts: Sequence[int]) -> RowsHandle:
    """Open computed rows [sum of row_counts, width] on a GPU to another process. The caller keeps `rows`.

    Asynchronous errors of their computation are raised here.
    """
    if rows.untyped_storage().nbytes() != rows.nbytes or not rows.is_contiguous():
        raise ValueError("rows that are shared need memory of their own")
    torch.cuda.current_stream(rows.device).synchronize()
    storage = dict(zip(_STORAGE, rows.untyped_storage()._share_cuda_(), strict=True))
    return RowsHandle(row_counts=tuple(row_counts), width=rows.shape[1], dtype=dtype_name(rows.dtype), **storage)


def trial_rows(device: torch.device | str) -> torch.Tensor:
    count = sum(TRIAL_ROWS)
    return torch.arange(count * TRIAL_WIDTH, dtype=torch.float32, device=device).view(count, TRIAL_WIDTH)


def try_out(borrower: CudaBorrower, trial: RowsHandle) -> None:
    """Copy the trial's rows. Raises ValueError if they arrive changed."""
    if not torch.equal(torch.cat([rows.cpu() for rows in borrower.copy(trial)]), trial_rows("cpu")):
        raise ValueError("what arrives is not what was sent")


class CudaBorrower:
    """Copies rows that workers lend. For one thread and one worker at a time.

    `device`: where rows are needed, the worker's GPU or a peer of it.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        self._counters: set[str] = set()

    def copy(self, handle: RowsHandle) -> tuple[torch.Tensor, ...]:
        """Return the rows of each temporal patch, in memory of their own on the device that needs them.

        The copy has ended, and nothing of the worker's is open any more. On an error, too, the handle is no longer
        used.
        """
        self._counters.add(handle.counter.decode())
        if self._stream is None:
            torch.cuda.init()
            self._stream = torch.cuda.Stream(self._device)  # of its own: not behind the LLM's work
        # also where the source is closed: torch waits there for the current stream
        with torch.cuda.stream(self._stream):
            source = _open(handle)
            try:
                copies = tuple(part.to(self._device, copy=True) for part in source.split(handle.row_counts))
            finally:
                self._stream.synchronize()
                del source
        for rows in copies:
            # allocated on one stream, used on the LLM's: the memory is not used again before that has gone on
            rows.record_stream(torch.cuda.default_stream(self._device))
        return copies

    def worker_gone(self) -> None:
        """Remove torch's counters, which outlive a worker that is killed or ends at once."""
        for name in self._counters:
            (_SHARED_MEMORY / Path(name).name).unlink(missing_ok=True)
        self._counters.clear()


def _open(handle: RowsHandle) -> torch.Tensor:
    """Open the worker's memory as a tensor [rows, width] on the worker's GPU. Dropping it closes the handle."""
    dtype: torch.dtype = getattr(torch, handle.dtype)
    shape = (sum(handle.row_counts), handle.width)
    try:
        if handle.nbytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{handle.nbytes} bytes are not rows {list(shape)} of {handle.dtype}")
        storage = torch.UntypedStorage._new_shared_cuda(*(getattr(handle, name) for name in _STORAGE))
    except BaseException:
        # nothing was opened, whose closing would say so
        torch.UntypedStorage._release_ipc_counter_cuda(handle.counter, handle.counter_offset)
        raise
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape, (handle.width, 1))
