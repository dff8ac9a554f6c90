"""Several residual streams; see `cpp/streams.cpp`. x [N, streams * size], contiguous, bfloat16 or float32."""

from __future__ import annotations

import ctypes

import torch

from vlmserve_common.kernels.library import operators
from vlmserve_common.kernels.packed_linear import PackedWeight, weight_struct


def stream_norm(x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float) -> torch.Tensor:
    """Return each stream of x [..., streams * size] divided by its root mean square, times 1 + weight [streams *
    size]."""
    out = torch.empty_like(x)
    operators().vs_stream_norm(
        int(x.dtype == torch.bfloat16),
        x.data_ptr(),
        weight.data_ptr(),
        x.numel() // x.shape[-1],
        streams,
        x.shape[-1] // streams,
        eps,
        out.data_ptr(),
    )
    return out


def stream_mix(gates: torch.Tensor, normed: torch.Tensor, streams: int) -> torch.Tensor:
    """Return [N, size], the mean over streams of sigmoid(gates) * normed, both as x."""
    size = normed.shape[1] // streams
    out = normed.new_empty(len(normed), size)
    operators().vs_stream_mix(
        int(normed.dtype == torch.bfloat16),
        gates.data_ptr(),
        normed.data_ptr(),
        len(normed),
        streams,
        size,
        out.data_ptr(),
    )
    return out


def stream_add(x: torch.Tensor, made: torch.Tensor, logits: torch.Tensor, streams: int) -> torch.Tensor:
    """Return x with made [N, size] added to each stream, times 2 sigmoid(logits [N, streams] / streams)."""
    out = torch.empty_like(x)
    operators().vs_stream_add(
        int(x.dtype == torch.bfloat16),
        x.data_ptr(),
        made.data_ptr(),
        logits.data_ptr(),
        len(x),
        streams,
        x.shape[1] // streams,
        out.data_ptr(),
    )
    return out


class StreamReader:
    """Norm, gates and mean of a hyper connection in one call. norm [streams * size], eps: of the norm. down, up,
    inject: the products' weights, which stay as long as this does; without `inject` there are no logits."""

    def __init__(
        self, norm: torch.Tensor, eps: float, down: PackedWeight, up: PackedWeight, inject: PackedWeight | None
    ) -> None:
        self.weights = down, up, inject
        self._norm, self._eps = norm, eps
        self._structs = [None if weight is None else weight_struct(weight) for weight in self.weights]
        self._addresses = [None if struct is None else ctypes.addressof(struct) for struct in self._structs]

    def __call__(self, x: torch.Tensor, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's input [N, size], and logits [N, streams], which are empty without `inject`."""
        rows, whole = x.shape
        inject = self.weights[2]
        mixed = x.new_empty(rows, whole // streams)
        logits = x.new_empty(rows, 0 if inject is None else streams)
        scratch = x.new_empty(rows * (2 * whole + self.weights[0].outputs))
        operators().vs_stream_read(
            int(x.dtype == torch.bfloat16),
            x.data_ptr(),
            rows,
            streams,
            whole // streams,
            self._norm.data_ptr(),
            self._eps,
            *self._addresses,
            mixed.data_ptr(),
            logits.data_ptr(),
            scratch.data_ptr(),
        )
        return mixed, logits
