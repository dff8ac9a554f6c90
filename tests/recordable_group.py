"""Collectives of processes that `fake_graphs.Recorder` records, as CUDA graphs hold those of NCCL."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch

from vlmserve_common.parallel import group as groups

_NUMBERS = itertools.count()
_GROUPS: weakref.WeakValueDictionary[int, _Recordable] = weakref.WeakValueDictionary()


@torch.library.custom_op("vlmserve_tests::add_up", mutates_args=("x",))
def add_up(x: torch.Tensor, number: int) -> None:
    _GROUPS[number].inner.allreduce([x]).wait()


@torch.library.custom_op("vlmserve_tests::bring_together", mutates_args=("out",))
def bring_together(out: torch.Tensor, x: torch.Tensor, number: int) -> None:
    _GROUPS[number].inner._allgather_base(out, x).wait()


@torch.library.custom_op("vlmserve_tests::add_up_parts", mutates_args=("out",))
def add_up_parts(out: torch.Tensor, x: torch.Tensor, number: int) -> None:
    _GROUPS[number].inner._reduce_scatter_base(out, x).wait()


class _Done:
    def wait(self) -> None:
        pass


class _Recordable:
    """A group of gloo."""

    def __init__(self, inner: Any) -> None:
        self.inner, self._number = inner, next(_NUMBERS)
        _GROUPS[self._number] = self

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Any:
        if options:
            return self.inner.allreduce(tensors, *options)
        add_up(tensors[0], self._number)
        return _Done()

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor) -> _Done:
        bring_together(out, x, self._number)
        return _Done()

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor) -> _Done:
        add_up_parts(out, x, self._number)
        return _Done()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def make_recordable_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on."""
    make = groups._make_group
    monkeypatch.setattr(groups, "_make_group", lambda *args: _Recordable(make(*args)))
