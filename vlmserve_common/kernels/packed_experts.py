"""A sparse MLP with packed weights: its router's choice, and its experts; see `cpp/experts.cpp`."""

from __future__ import annotations

import ctypes

import torch

from vlmserve_common.kernels.library import active, pointer
from vlmserve_common.kernels.packed_linear import ACTS, PackedWeight, weight_struct


def route(logits: torch.Tensor, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, experts] -> the likeliest experts int64 [N, chosen], and their scores in the logits' dtype, which add
    up to 1; of equally likely ones the first."""
    lib = active()
    assert lib is not None
    rows, experts = logits.shape
    ids = torch.empty((rows, chosen), dtype=torch.int64)
    scores = torch.empty((rows, chosen), dtype=logits.dtype)
    narrow = int(logits.dtype == torch.bfloat16)
    lib.vs_route(narrow, logits.data_ptr(), rows, experts, chosen, ids.data_ptr(), scores.data_ptr())
    return ids, scores


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    *,
    act: str,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [N, size] -> residual + the sum of scores [N, chosen] * expert ids int64 [N, chosen] of x, [N, size]; ids below
    0 are not here.

    gate_up (gated), down: of all experts. All of one dtype, contiguous.
    """
    lib = active()
    assert lib is not None
    rows, chosen = ids.shape
    out = torch.empty_like(x)
    scratch = torch.empty(rows * chosen * experts_scratch(gate_up), dtype=x.dtype)
    lib.vs_experts(
        int(x.dtype == torch.bfloat16),
        ctypes.byref(weight_struct(gate_up)),
        ctypes.byref(weight_struct(down)),
        gate_up.count,
        chosen,
        ACTS[act],
        x.data_ptr(),
        rows,
        ids.data_ptr(),
        scores.data_ptr(),
        pointer(residual),
        out.data_ptr(),
        scratch.data_ptr(),
    )
    return out


def experts_scratch(gate_up: PackedWeight) -> int:
    """Elements of memory that the library needs for a token in an expert."""
    return gate_up.inner + gate_up.outputs
