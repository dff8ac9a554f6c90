"""CPU tensors that stand for those of a GPU, and count what is asked of it.

Under `FakeCuda` torch's functions take and make `CudaTensor`s where a device is "cuda": these say that they are there,
refuse `numpy` as those of a GPU do, and hold a CPU tensor that everything is computed on. What waits for a GPU is
counted as such, copies by their direction and bytes, and every operator that computes as one launch (a real one may be
several). Non-blocking copies to page-locked memory are there when a mark behind them is waited for, and not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda", 0)
_GARBAGE = 0x5A
_PER_QUESTION = 50
_CREATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias"}
_CREATE |= {"_unsafe_view", "_reshape_alias", "resize_", "scalar_tensor"}
_SYNCHRONISING = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class CudaTensor(torch.Tensor):
    """inner: the CPU tensor that it is computed on."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="cpu")
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a GPU's tensor, and no FakeCuda")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} went past FakeCuda")


@dataclass
class Counts:
    """syncs: by what waited. launches: by operator. uploads, downloads: how many, and bytes."""

    syncs: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0


class FakeMark:
    """Of `FakeCuda`: see `vlmserve_common.compute.transfers.Mark`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._behind = cuda.launched

    def wait(self) -> None:
        self._cuda.come_to(self._behind)

    def passed(self) -> bool:
        """The device gets on a little whenever it is asked."""
        passed = self._cuda.done >= self._behind
        self._cuda.come_to(min(self._cuda.done + _PER_QUESTION, self._cuda.launched))
        return passed

    def seconds_since(self, earlier: FakeMark) -> float:
        assert self._cuda.done >= self._behind >= earlier._behind, "times of what the device has not done yet"
        return 0.001 * (self._behind - earlier._behind)


class _Dispatched(TorchDispatchMode):
    """Counts what functions on a GPU's tensors come down to."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _SYNCHRONISING or (name in _INDEXING and _has_mask(args[1])):
            self._cuda.synchronise(name)
        elif name not in _CREATE and not func.is_view:
            self._cuda.launch(name)
        return func(*args, **(kwargs or {}))


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, CudaTensor) else tensor


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def _triton_launches(cuda: FakeCuda) -> Iterator[None]:
    """Triton's kernels run by its interpreter, on the inner tensors."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield
        return

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        cuda.launch(kernel.fn.__name__)
        args, kwargs = tree_map_only(CudaTensor, lambda tensor: tensor.inner, (args, kwargs))
        return original(kernel, *args, **kwargs)

    original, InterpretedFunction.run = InterpretedFunction.run, run
    try:
        yield
    finally:
        InterpretedFunction.run = original


class FakeCuda(TorchFunctionMode):
    """A context in which there is one GPU. launched, done: how much it was asked to do, and has done."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.launched = self.done = 0
        self._landing: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._pinned: dict[int, torch.Tensor] = {}  # kept, so that no other memory has their places
        self._dispatched = _Dispatched(self)

    # ------------------------------------------------------------ what a device does

    def mark(self) -> FakeMark:
        """Behind what was launched."""
        return FakeMark(self)

    def launch(self, name: str) -> None:
        self.launched += 1
        self.counts.launches[name] += 1

    def synchronise(self, why: str) -> None:
        self.counts.syncs[why] += 1
        self.come_to(self.launched)

    def come_to(self, place: int) -> None:
        """Everything launched before is done, and has landed on the host."""
        self.done = max(self.done, place)
        for _, target, value in [one for one in self._landing if one[0] <= place]:
            with torch.inference_mode():
                target.copy_(value)
        self._landing = [one for one in self._landing if one[0] > place]

    @contextmanager
    def counting(self):
        """Counts of what is done in it."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    # ------------------------------------------------------------ torch's functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        own = _OWN.get(func)
        on_cuda = any(isinstance(leaf, CudaTensor) for leaf in tree_leaves((args, kwargs)))
        if own is not None and (on_cuda or func in _OF_HOST):
            return own(self, *args, **kwargs)
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            on_cuda, kwargs["device"] = True, torch.device("cpu")
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        if not on_cuda:
            return func(*args, **kwargs)
        return self.compute(func, args, kwargs)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On the inner tensors; results are a GPU's again."""
        if func in (torch.tensor, torch.as_tensor):  # made on the host, and copied
            return self._upload(func(*args, **kwargs), waits=True)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (torch.Tensor, np.ndarray))]
        known = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, CudaTensor)}
        if any(not isinstance(leaf, CudaTensor) and leaf.ndim for leaf in leaves):
            if func not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                raise RuntimeError(f"{func}: Expected all tensors to be on the same device")
            self.synchronise("index or values from the host")
        args, kwargs = tree_map_only(CudaTensor, lambda tensor: tensor.inner, (args, kwargs))
        with self._dispatched:
            out = func(*args, **kwargs)
        return tree_map_only(
            torch.Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else CudaTensor(tensor), out
        )

    def __enter__(self) -> FakeCuda:
        self._stack = ExitStack()
        self._stack.enter_context(_triton_launches(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    # ------------------------------------------------------------ copies

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _upload(self, source: torch.Tensor, *, waits: bool) -> CudaTensor:
        self._count_upload(source, waits=waits)
        return CudaTensor(source.clone())

    def _count_upload(self, source: torch.Tensor, *, waits: bool) -> None:
        self.launched += 1
        self.counts.uploads += 1
        self.counts.upload_bytes += source.nbytes
        if waits or not self._is_pinned(source):
            self.synchronise("copy to the device")

    def _download(self, source: CudaTensor, target: torch.Tensor, *, waits: bool) -> torch.Tensor:
        self.launched += 1
        self.counts.downloads += 1
        self.counts.download_bytes += source.inner.nbytes
        self._landing.append((self.launched, target, source.inner.clone()))
        if waits or not self._is_pinned(target):
            self.synchronise("copy to the host")
        else:
            target.view(torch.uint8).fill_(_GARBAGE)
        return target

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to`."""
        waits, copy = not kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, torch.Tensor):
                device, dtype = self.device_of(arg), _inner(arg).dtype
            elif arg is not None and not isinstance(arg, bool):
                device = arg
        here = self.device_of(tensor).type
        there = here if device is None else torch.device(device).type
        dtype = dtype or _inner(tensor).dtype
        if there == here == "cpu":
            return tensor.to(dtype, copy=copy)
        if there == here:
            same = dtype == _inner(tensor).dtype and not copy
            return tensor if same else self.compute(torch.Tensor.to, (tensor, dtype), {"copy": copy})
        if there == "cuda":
            made = self._upload(tensor, waits=waits)
            return made if dtype == made.inner.dtype else self.compute(torch.Tensor.to, (made, dtype), {})
        assert isinstance(tensor, CudaTensor)
        target = torch.empty(tensor.inner.shape, dtype=tensor.inner.dtype)
        return self._download(tensor, target, waits=waits).to(dtype)

    def copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """`Tensor.copy_`."""
        if isinstance(target, CudaTensor) and isinstance(source, CudaTensor):
            return self.compute(torch.Tensor.copy_, (target, source), {})
        if isinstance(target, CudaTensor):
            self._count_upload(source, waits=not non_blocking)
            target.inner.copy_(source)
            return target
        assert isinstance(source, CudaTensor)
        return self._download(source, target, waits=not non_blocking)

    def cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """`Tensor.cpu`."""
        return self.to(tensor, "cpu")

    def tolist(self, tensor: torch.Tensor) -> Any:
        """`Tensor.tolist`."""
        return self.to(tensor, "cpu").tolist()

    def numpy(self, tensor: torch.Tensor) -> Any:
        """`Tensor.numpy`, as a GPU's tensor refuses it."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """`Tensor.pin_memory`."""
        return tensor if self._is_pinned(tensor) else self._pin(tensor.clone())

    @staticmethod
    def device_of(tensor: torch.Tensor) -> torch.device:
        """`Tensor.device`."""
        return CUDA if isinstance(tensor, CudaTensor) else torch.device("cpu")


_OWN: dict[Any, Any] = {
    torch.Tensor.to: FakeCuda.to,
    torch.Tensor.copy_: FakeCuda.copy_,
    torch.Tensor.cpu: FakeCuda.cpu,
    torch.Tensor.tolist: FakeCuda.tolist,
    torch.Tensor.numpy: FakeCuda.numpy,
    torch.Tensor.pin_memory: FakeCuda.pin_memory,
    torch.Tensor.device.__get__: lambda cuda, tensor: cuda.device_of(tensor),
    torch.Tensor.is_cuda.__get__: lambda cuda, tensor: True,
    torch.Tensor.is_cpu.__get__: lambda cuda, tensor: False,
}
_OF_HOST = {torch.Tensor.to, torch.Tensor.pin_memory}
