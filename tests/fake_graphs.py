"""Graphs without a GPU: two that stand for `vlmserve_common.compute.graphs.CudaCapturer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
_WAITS = {_ATEN.item.default, _ATEN._local_scalar_dense.default, _ATEN.nonzero.default, _ATEN.masked_select.default}
_POISON = {torch.bool: True, torch.uint8: 255}


class CallsAgain:
    """Its graphs call again what was captured. replayed: how often they did."""

    def __init__(self) -> None:
        self.replayed = 0

    def capture(self, run: Callable[[], None]) -> CallsAgain._Graph:
        run()
        return self._Graph(self, run)

    class _Graph:
        def __init__(self, owner: CallsAgain, run: Callable[[], None]) -> None:
            self._owner, self._run = owner, run

        def replay(self) -> None:
            self._owner.replayed += 1
            self._run()


class Recorder:
    """Its graphs are as a GPU's: what torch was told to do is done again to the memory that it was done to, and no line
    of Python runs. What was between inputs and outputs is overwritten before."""

    def __init__(self) -> None:
        self.replayed = 0

    def capture(self, run: Callable[[], None]) -> _Recording:
        run()  # to warm up
        recording = _Recording(self)
        with recording:
            run()
        return recording


class _Recording(TorchDispatchMode):
    def __init__(self, owner: Recorder) -> None:
        super().__init__()
        self._owner = owner
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITS:
            raise RuntimeError(f"{func} waits for the device, which a capture forbids")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self._owner.replayed += 1
        outer = {_memory(leaf) for _, args, kwargs, _ in self._calls for leaf in _tensors((args, kwargs))}
        for _, args, kwargs, out in self._calls:
            for made in _tensors(out):
                if _memory(made) not in {_memory(leaf) for leaf in _tensors((args, kwargs))}:
                    outer.discard(_memory(made))
                    made.fill_(_POISON.get(made.dtype, torch.nan if made.is_floating_point() else -(10**6)))
        assert outer, "a graph without inputs"
        for func, args, kwargs, out in self._calls:
            for kept, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if _memory(kept) != _memory(new):
                    kept.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
