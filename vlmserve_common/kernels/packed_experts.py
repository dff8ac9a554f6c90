"""A sparse MLP with packed weights: its router's choice, and its experts; see `cpp/experts.cpp`."""

from __future__ import annotations

import ctypes

import torch

from vlmserve_common.kernels.library import active, pointer
from vlmserve_common.kernels.packed_linear import ACTS, PackedWeight, weight_struct


def route(logits: torch.Tensor, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's likeliest experts from logits [N, experts]; the first of equally likely ones.

    Returns int64 [N, chosen], and their scores in the logits' dtype, which add up to 1.
    """
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
    """Return residual + the sum over each token's experts `ids` int64 [N, chosen], times `scores` [N, chosen].

    x [N, size] and the result have one dtype and are contiguous, as are scores and residual. gate_up (gated), down: of
    all experts. Experts with ids below 0 are on other ranks, and add nothing.
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
    """Return how many elements of memory the library needs for a token in an expert."""
    return gate_up.inner + gate_up.outputs
