"""The launches of a GPU, counted on a machine that may have none, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"}
_NO_LAUNCH |= {"alias", "lift_fresh", "_reshape_alias"}


@contextmanager
def launches() -> Iterator[list[str]]:
    """Yield a list that grows by the names of the operators and kernels that would be launched on a GPU.

    An operator of torch that computes something is one launch (a few are more on a GPU), and so is a kernel of
    Triton, also under its interpreter.
    """
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    from vlmserve_common.kernels.gpu.common import INTERPRETED

    launched: list[str] = []
    operators = _Operators(launched)
    owner, name = (GridExecutor, "__call__") if INTERPRETED else (JITFunction, "run")
    plain = getattr(owner, name)

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append((kernel.fn if INTERPRETED else kernel).__name__)
        operators.inside_a_kernel = True
        try:
            return plain(kernel, *args, **kwargs)
        finally:
            operators.inside_a_kernel = False

    with mock.patch.object(owner, name, counted), operators:
        yield launched


class _Operators(TorchDispatchMode):
    """Notes torch's operators, but not those of the interpreter inside a kernel."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched
        self.inside_a_kernel = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not (self.inside_a_kernel or name in _NO_LAUNCH or (function.is_view and _shares_memory(out, args))):
            self._launched.append(name)
        return out


def _shares_memory(out: Any, args: Any) -> bool:
    """Return True if an operator that may return the memory of its input (`to`, `reshape`) did."""
    first = next((one for one in tree_leaves(out) if isinstance(one, torch.Tensor)), None)
    given = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
    return first is None or first.untyped_storage().data_ptr() in given
