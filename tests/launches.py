"""Counts what would be launched on a GPU: torch's operators that compute something, and Triton's kernels."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from vlmserve_common.kernels.gpu.interpreter import INTERPRETED

_FREE = {"empty", "empty_like", "new_empty", "_unsafe_view", "detach", "alias", "lift_fresh"}


class _Operators(TorchDispatchMode):
    def __init__(self, launched):
        super().__init__()
        self._launched = launched
        self.paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not self.paused and name not in _FREE and not (function.is_view and _is_part(out, args[0])):
            self._launched.append(name)
        return out


def _is_part(out, of):
    """Whether an operator that may return a view did, as `to` and `reshape` do at times."""
    parts = out if isinstance(out, list | tuple) else [out]
    return all(part.untyped_storage().data_ptr() == of.untyped_storage().data_ptr() for part in parts)


@contextmanager
def launches():
    """A list of names that grows by what is launched inside. The interpreter's own work does not count."""
    launched = []
    operators = _Operators(launched)
    owner, name = (GridExecutor, "__call__") if INTERPRETED else (JITFunction, "run")
    plain = getattr(owner, name)

    def counted(kernel, *args, **kwargs):
        launched.append((kernel.fn if INTERPRETED else kernel).__name__)
        operators.paused = True
        try:
            return plain(kernel, *args, **kwargs)
        finally:
            operators.paused = False

    with mock.patch.object(owner, name, counted), torch.inference_mode(), operators:
        yield launched
