"""Gives memory back to the system while its addresses stay, as operators and captured steps need them.

On a CPU the kernel takes whole pages back, and gives zeros when they are touched again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import nn

from vlmserve.executor.model_runner import ModelRunner
from vlmserve.ipc.weight_messages import MemoryTag
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.linear import Linear
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.packed_linear import PackedWeight

log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ReleasedMemory:
    """The memory of a runner, which may be released. released: what is. alive: see `RankWeights`."""

    def __init__(self, runner: ModelRunner, alive: Callable[[], object]) -> None:
        self._runner, self._alive = runner, alive
        self.released: frozenset[MemoryTag] = frozenset()
        self._kept: IO[bytes] | None = None

    def release(self, tags: Sequence[MemoryTag], *, discard: bool) -> int:
        """Give back the memory of some kinds, and return by how many bytes this process is smaller. Weights are written
        to a file first, unless they are to be discarded. EngineError on a GPU."""
        if self._runner.device.type != "cpu":
            raise EngineError("memory is given back on CPUs only")
        before = _resident()
        for tag in tags:
            if tag in self.released:
                continue
            tensors = list(self._tensors(tag))
            if tag == "weights" and not discard:
                self._kept = _written(tensors, self._alive)
            self.released |= {tag}  # before: the first page that goes takes its weights along
            for tensor in tensors:
                _give_back(tensor)
        return max(0, before - _resident())

    def resume(self, tags: Sequence[MemoryTag]) -> int:
        """Take memory back, with its weights if they were kept, and return its bytes. EngineError if their file is too
        short."""
        taken = 0
        for tag in tags:
            if tag not in self.released:
                continue
            tensors = list(self._tensors(tag))
            if self._kept is not None and tag == "weights":
                self._kept.seek(0)
                for tensor in tensors:
                    self._alive()
                    _read(self._kept, tensor.numpy().data)
                self._kept.close()
                self._kept = None
            taken += sum(tensor.nbytes for tensor in tensors)
            self.released -= {tag}
        return taken

    def _tensors(self, tag: MemoryTag) -> Iterator[torch.Tensor]:
        runner = self._runner
        if tag == "weights":
            yield from _distinct(_weights(runner.model))
            return
        for layer in runner.kv_cache.layers:
            yield from _distinct(
                part for part in (layer.keys, layer.values, layer.key_scales, layer.value_scales) if part is not None
            )
        if runner.kv_transfer is not None:
            yield from _distinct([runner.kv_transfer.rows])
        for cache in (runner.recurrent_cache, runner.recurrent_cache and runner.recurrent_cache.guesses):
            yield from _distinct(part for part in vars(cache or object).values() if isinstance(part, torch.Tensor))


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    for child in model.modules():
        packed = child.packed if isinstance(child, Linear | Experts) else getattr(child, "_packed_head", None)
        for one in packed if isinstance(packed, tuple) else (packed,):
            if isinstance(one, PackedWeight):
                yield one.data
                if one.bias is not None:
                    yield one.bias


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the memory of tensors, uint8 [bytes], each once."""
    found: set[int] = set()
    for tensor in tensors:
        if tensor.is_cpu and tensor.numel() and tensor.data_ptr() not in found:
            found.add(tensor.data_ptr())
            yield tensor.detach().view(-1).view(torch.uint8)


def _written(tensors: Iterable[torch.Tensor], alive: Callable[[], object]) -> IO[bytes]:
    file = tempfile.TemporaryFile(prefix="vlmserve-weights-", buffering=0)  # noqa: SIM115 -- it stays
    try:
        for tensor in tensors:
            alive()
            rest = tensor.numpy().data
            while len(rest):
                rest = rest[file.write(rest) :]
    except OSError as error:
        file.close()
        raise EngineError(f"the weights cannot be kept in {tempfile.gettempdir()}: {error}") from error
    return file


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _read(file: IO[bytes], into: memoryview) -> None:
    """Fill a buffer from an unbuffered file, which gives at most 2 GiB at once."""
    while len(into):
        count = file.readinto(into)  # type: ignore[attr-defined]
        if not count:
            raise EngineError(f"{len(into)} bytes of the weights that were kept are missing")
        into = into[count:]


def _give_back(tensor: torch.Tensor) -> None:
    """Give back the whole pages of some memory."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0 and _LIBC.madvise(start, size, mmap.MADV_DONTNEED):
        raise EngineError(f"memory is not given back: error {ctypes.get_errno()}")
