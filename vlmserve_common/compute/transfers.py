"""Copies arrays to a device and results back, without waiting for the device.

On a GPU, arrays that belong together are packed into one page-locked buffer and one copy, which its stream makes in its
turn. Results come back in the same way. torch's allocator of page-locked memory reuses a buffer only when an event says
that its copies are done. It keeps its buffers, so a step allocates nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

_ALIGNMENT = 16  # bytes: of each array in a packed copy, for vector loads


class Mark:
    """A place in a device's work, behind everything that was launched before. A CPU has done everything when a call
    returns."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """Block until the device has reached the mark. Raises errors of the device until then."""

    def passed(self) -> bool:
        """Return whether the device has reached the mark."""
        return True

    def seconds_since(self, earlier: Mark) -> float:
        """Return the seconds between two marks that the device has passed."""
        return self._at - earlier._at


class CudaMark(Mark):
    """An event on the current stream of the current GPU."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def passed(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1000


class Download:
    """Tensors on their way to the host."""

    def __init__(self, mark: Mark, take: Callable[[], list[np.ndarray]]) -> None:
        self.mark = mark
        self._take = take

    def arrays(self) -> list[np.ndarray]:
        """Return the tensors' values as arrays that the caller owns; to be called once. Waits for the device, as far as
        `mark`."""
        self.mark.wait()
        return self._take()


class Transfers:
    """Copies between the host and one device, on its current stream. These go to the CPU itself: tensors are the
    arrays' own memory."""

    device = torch.device("cpu")

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Return each array on the device, for work launched from now on. The arrays must not change afterwards."""
        # arrays decoded from a message are read-only views of its frames
        return [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Have tensors of the device copied to the host, in the device's turn."""
        arrays = [tensor.numpy() for tensor in tensors]
        return Download(Mark(), lambda: arrays)

    def mark(self) -> Mark:
        """Return a mark behind everything that was launched so far."""
        return Mark()


class PackedTransfers(Transfers):
    """Transfers to a GPU: see the module docstring. make_mark: of its current stream."""

    def __init__(self, device: torch.device, make_mark: Callable[[], Mark] = CudaMark) -> None:
        self.device = device
        self._make_mark = make_mark

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """See `Transfers`. The tensors are parts of one buffer, each at a multiple of 16 bytes."""
        starts, total = [], 0
        for array in arrays:
            starts.append(total)
            total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        staged = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        host = staged.numpy()
        for array, start in zip(arrays, starts, strict=True):
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        sent = torch.empty(total, dtype=torch.uint8, device=self.device)
        sent.copy_(staged, non_blocking=True)
        return [
            sent[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if not parts:
            empty = [np.zeros(tuple(tensor.shape), _NUMPY[tensor.dtype]) for tensor in tensors]
            return Download(self._make_mark(), lambda: empty)
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        landed = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True)
        landed.copy_(packed, non_blocking=True)
        forms = [(tuple(tensor.shape), _NUMPY[tensor.dtype]) for tensor in tensors]
        return Download(self._make_mark(), lambda: _unpacked(landed.numpy(), forms))

    def mark(self) -> Mark:
        return self._make_mark()


_DTYPES = {
    np.dtype(dtype): torch.from_numpy(np.zeros(0, dtype)).dtype
    for dtype in (np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32)
}
_NUMPY = {ours: theirs for theirs, ours in _DTYPES.items()}


def _unpacked(data: np.ndarray, forms: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    """data: uint8, arrays of these shapes and dtypes one behind the other -> copies of them."""
    arrays, start = [], 0
    for shape, dtype in forms:
        end = start + math.prod(shape) * dtype.itemsize
        arrays.append(data[start:end].view(dtype).reshape(shape).copy())
        start = end
    return arrays


def transfers_for(device: torch.device) -> Transfers:
    """Return the transfers of a device."""
    return Transfers() if device.type == "cpu" else PackedTransfers(device)


class Uploaded:
    """An array of an upload."""

    def __init__(self) -> None:
        self.arrived: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor on the device, once the upload was sent."""
        assert self.arrived is not None, "not sent yet"
        return self.arrived


class Upload:
    """Arrays that go to a device together, from several callers: `add` each, `send` once."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._arrays: list[np.ndarray] = []
        self._uploaded: list[Uploaded] = []

    def add(self, array: np.ndarray) -> Uploaded:
        """Add an array, which must not change afterwards."""
        self._arrays.append(array)
        self._uploaded.append(Uploaded())
        return self._uploaded[-1]

    def send(self) -> None:
        """Send all arrays; their tensors exist from now on."""
        if self._arrays:
            for uploaded, tensor in zip(self._uploaded, self._transfers.upload(self._arrays), strict=True):
                uploaded.arrived = tensor


def gathered(arrays: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """Join arrays one behind the other, in memory that `to_device` copies without a detour. Torch knows page-locked
    memory that went through numpy by its first byte alone, and keeps it by that until it is read. So the whole memory
    is used."""
    if device.type == "cpu":
        return np.concatenate(arrays)
    shape = sum(len(array) for array in arrays), *arrays[0].shape[1:]
    staged = torch.empty(shape, dtype=_DTYPES[arrays[0].dtype], pin_memory=True)
    return np.concatenate(arrays, out=staged.numpy())


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU on a device, for work launched there from now on, without waiting for the device."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    return tensor.pin_memory().to(device, non_blocking=True)
