"""Launches work beside other work of the same device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from vlmserve_common.compute.transfers import CudaMark, Mark


class Lane:
    """A sequence of work. It is done in order, and in no order with work of other lanes. On a CPU everything is done
    when a call returns. beside: whether other work of the device goes on meanwhile."""

    beside = False

    def launching(self) -> AbstractContextManager[object]:
        """Launch everything in this context in the lane."""
        return nullcontext()

    def mark(self) -> Mark:
        """Return a mark behind everything that was launched in the lane so far."""
        return Mark()

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let work outside of the lane use tensors that were made in it, up to a mark that has passed. Their memory is
        not reused before that work is done."""


class CudaLane(Lane):
    """A stream of its own. It begins behind the current stream's work so far, which loads weights."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def launching(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        with torch.cuda.stream(self._stream):
            return CudaMark()

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def lane_beside(device: torch.device) -> Lane:
    """Make a new lane of a device."""
    return CudaLane(device) if device.type == "cuda" else Lane()
