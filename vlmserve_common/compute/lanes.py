"""Where work is launched beside other work of the same device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from vlmserve_common.compute.transfers import CudaMark, HostMark, Mark


class Lane(Protocol):
    """Its work is done in order, and in no order with that of others."""

    def launching(self) -> AbstractContextManager[object]:
        """What is launched in this context is the lane's."""
        ...

    def mark(self) -> Mark:
        """Behind all of the lane's that was launched so far."""
        ...

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on tensors that were made in the lane, up to a mark that has passed, are used by what is launched
        outside of it, and their memory is not used again before that is done."""
        ...


class HostLane:
    """Of a CPU, where everything is done when a call returns."""

    def launching(self) -> AbstractContextManager[object]:
        """See `Lane`."""
        return nullcontext()

    def mark(self) -> Mark:
        """See `Lane`."""
        return HostMark()

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Lane`."""


class CudaLane:
    """A stream, which begins behind what the current one was asked for so far: weights are loaded there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def launching(self) -> AbstractContextManager[object]:
        """See `Lane`."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """See `Lane`."""
        with torch.cuda.stream(self._stream):
            return CudaMark()

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Lane`."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def lane_beside(device: torch.device) -> Lane:
    """A new one of a device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
