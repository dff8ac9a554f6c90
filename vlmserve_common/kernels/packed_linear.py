"""Products with packed weights, and sparse MLPs of them; see `cpp/linear.cpp` and `cpp/experts.cpp`."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from vlmserve_common.kernels.library import active, operators, pointer

PANEL = 64
# The library's names for what a product goes through.
ACTS = {"": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "quick_gelu": 3, "silu": 4}
Kind = Literal["float32", "bfloat16", "int8", "int4", "w8a8"]
# ... and for weights.
KINDS: Mapping[Kind, int] = MappingProxyType({"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "w8a8": 4})


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight [columns, inner] and its bias as the library reads them.

    gated: the first half of the columns are gates of the second half, so the product has half as many outputs. dtype:
    of x. group: inputs that share a scale; shifted: whether any zero is not in the middle (see `QuantizedWeight`).
    count: equal-sized weights one after another in `data`; `linear` takes one.
    """

    data: torch.Tensor
    bias: torch.Tensor | None
    kind: Kind
    inner: int
    panels: int
    outputs: int
    group: int
    shifted: bool
    gated: bool
    dtype: torch.dtype
    count: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of memory."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def one(self, number: int) -> PackedWeight:
        """Return one of several weights, in the same memory."""
        size = len(self.data) // self.count
        return replace(self, data=self.data[number * size : (number + 1) * size], count=1)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this process has the library, and it multiplies by such a weight."""
    return (
        active() is not None
        and weight.is_cpu
        and weight.dtype in (torch.bfloat16, torch.float32)
        and weight.shape[1] % 2 == 0
    )


def pack(weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> PackedWeight:
    """weight [N, K], bias [N] -> a copy for `linear`. gated: see `PackedWeight`."""
    weight = weight.contiguous()
    rows, inner = weight.shape
    order = column_order(rows, gated=gated)
    wide = weight.dtype == torch.float32
    data = torch.zeros(len(order) * inner, dtype=weight.dtype)
    _pack_rows(weight, order, data)
    return PackedWeight(
        data=data,
        bias=packed_bias(bias, order),
        kind="float32" if wide else "bfloat16",
        inner=inner,
        panels=len(order) // PANEL,
        outputs=rows // 2 if gated else rows,
        group=inner,
        shifted=False,
        gated=gated,
        dtype=weight.dtype,
    )


def _pack_rows(weight: torch.Tensor, order: np.ndarray, data: torch.Tensor) -> None:
    lib = operators()
    (lib.vs_pack_f32 if weight.dtype == torch.float32 else lib.vs_pack_bf16)(
        weight.data_ptr(), weight.shape[1], order.ctypes.data, len(order), data.data_ptr()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """The place of some rows of a weight that is packed: `panels` of it, of which column c is row order[c] of these; or
    another row if that is negative."""

    panels: torch.Tensor
    columns: slice
    order: np.ndarray


def place_of_rows(packed: PackedWeight, first: int, count: int, *, index: int = 0) -> PackedRows:
    """Find rows first .. first + count - 1 of a packed weight. index: which of its `count` weights."""
    order = column_order(packed.outputs * (1 + packed.gated), gated=packed.gated)
    there = (order >= first) & (order < first + count)
    at = np.flatnonzero(there.reshape(-1, PANEL).any(1))
    panels = slice(int(at[0]), int(at[-1]) + 1)
    columns = slice(panels.start * PANEL, panels.stop * PANEL)
    return PackedRows(
        panels=packed.data.view(packed.count, packed.panels, -1)[index, panels],
        columns=columns,
        order=np.ascontiguousarray(np.where(there, order - first, -1)[columns]),
    )


def repack(packed: PackedWeight, first: int, rows: torch.Tensor, *, index: int = 0) -> None:
    """Pack rows [n, inner] of another weight, from number `first` on, in place; other rows stay. index: see
    `place_of_rows`. For weights that are not quantised."""
    rows = rows.contiguous()
    place = place_of_rows(packed, first, len(rows), index=index)
    _pack_rows(rows, place.order, place.panels)


def rewrite_bias(packed: PackedWeight, first: int, bias: torch.Tensor) -> None:
    """Put another bias [n] in the place of the rows from number `first` on."""
    assert packed.bias is not None
    place = place_of_rows(packed, first, len(bias))
    here = torch.from_numpy(np.flatnonzero(place.order >= 0))
    packed.bias[place.columns][here] = bias.to(packed.dtype).float()[torch.from_numpy(place.order)[here]]


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    act: str = "",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    added: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, inner] of the weight's dtype -> residual + act(x W^T + bias + added) [M, outputs]; gated: act(gate) * up.

    Rounded once, to out_dtype: x's, or float32 without a residual. added: of `kernels.lora.added`. out: where the
    result goes, in rows that may lie apart.
    """
    assert weight.count == 1
    assert x.shape[1] == weight.inner
    if out is None:
        out = torch.empty((len(x), weight.outputs), dtype=out_dtype or x.dtype)
    assert out.shape == (len(x), weight.outputs)
    assert out.stride(1) == 1
    operators().vs_linear(
        KINDS[weight.kind],
        int(x.dtype == torch.bfloat16),
        int(out.dtype == torch.bfloat16),
        x.data_ptr(),
        len(x),
        weight.inner,
        x.stride(0),
        weight.data.data_ptr(),
        weight.panels,
        weight.outputs,
        weight.group,
        int(weight.shifted),
        pointer(weight.bias),
        pointer(added),
        ACTS[act],
        int(weight.gated),
        pointer(residual),
        out.data_ptr(),
        out.stride(0),
    )
    return out


def stacked(weights: Iterable[PackedWeight], count: int) -> PackedWeight:
    """`count` weights alike, without biases, one behind the other. Each is copied before the next one is asked for, so
    that there need be no more than one beside the result."""
    order = iter(weights)
    first = next(order)
    size = len(first.data)
    data = first.data.new_empty((count * size, *first.data.shape[1:]))
    shifted, place = False, 0
    for place, weight in enumerate(itertools.chain([first], order)):
        data[place * size : (place + 1) * size] = weight.data
        shifted = shifted or weight.shifted
    assert place == count - 1
    return replace(first, data=data, shifted=shifted, count=count)


class WeightStruct(ctypes.Structure):
    """A `PackedWeight` as the library's functions get it; see `cpp/operators.h`."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("inner", c_int64),
        ("panels", c_int64),
        ("outputs", c_int64),
        ("group", c_int64),
        ("bytes", c_int64),
        ("kind", c_int32),
        ("shifted", c_int32),
    ]


def weight_struct(weight: PackedWeight) -> WeightStruct:
    """It holds pointers: the weight must outlast it."""
    return WeightStruct(
        weight.data.data_ptr(),
        pointer(weight.bias),
        weight.inner,
        weight.panels,
        weight.outputs,
        weight.group,
        weight.data.nbytes // weight.count,
        KINDS[weight.kind],
        int(weight.shifted),
    )


def column_order(rows: int, *, gated: bool) -> np.ndarray:
    """The weight's row of each packed column, int64 [columns], -1 where there is none."""
    if not gated:
        return _padded(np.arange(rows), PANEL)
    # panels of 32 gates and the 32 columns that these open
    half = PANEL // 2
    gates = _padded(np.arange(rows // 2), half).reshape(-1, half)
    ups = np.where(gates < 0, -1, gates + rows // 2)
    return np.concatenate((gates, ups), axis=1).reshape(-1)


def packed_bias(bias: torch.Tensor | None, order: np.ndarray) -> torch.Tensor | None:
    """A bias [rows] in the order of the packed columns, float32."""
    if bias is None:
        return None
    return bias.float()[torch.from_numpy(np.maximum(order, 0))].masked_fill_(torch.from_numpy(order < 0), 0)


def _padded(order: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate((order, np.full(-len(order) % size, -1))).astype(np.int64)


def route(logits: torch.Tensor, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's likeliest experts from logits [N, experts]; the first of equally likely ones.

    Returns int64 [N, chosen], and their scores in the logits' dtype, which add up to 1.
    """
    rows, experts = logits.shape
    ids = torch.empty((rows, chosen), dtype=torch.int64)
    scores = torch.empty((rows, chosen), dtype=logits.dtype)
    narrow = int(logits.dtype == torch.bfloat16)
    operators().vs_route(narrow, logits.data_ptr(), rows, experts, chosen, ids.data_ptr(), scores.data_ptr())
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

    x [N, size] and the result have one dtype. They, scores and residual are contiguous. gate_up (gated), down: of
    all experts. Experts with ids below 0 are on other ranks, and add nothing.
    """
    rows, chosen = ids.shape
    out = torch.empty_like(x)
    scratch = torch.empty(rows * chosen * experts_scratch(gate_up), dtype=x.dtype)
    operators().vs_experts(
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


class SharedMLP:
    """A sparse MLP with one more expert, which all tokens go through, times a gate, in one call. The weights stay as
    long as this does. router, gate_up, down: as of `run_experts`; the shared expert's; its gate."""

    def __init__(
        self,
        router: PackedWeight,
        gate_up: PackedWeight,
        down: PackedWeight,
        shared_gate_up: PackedWeight,
        shared_down: PackedWeight,
        shared_gate: PackedWeight,
        *,
        chosen: int,
        act: str,
    ) -> None:
        self.weights = router, gate_up, down, shared_gate_up, shared_down, shared_gate
        assert gate_up.count == router.outputs
        self._structs = [weight_struct(weight) for weight in self.weights]
        self._addresses = [ctypes.addressof(struct) for struct in self._structs]
        self._chosen, self._act = chosen, ACTS[act]
        self._scratch = (
            router.outputs + chosen * (1 + experts_scratch(gate_up)) + shared_gate_up.outputs + router.inner + 1
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, size], contiguous -> [N, size]."""
        assert x.is_contiguous()
        out = torch.empty_like(x)
        scratch = x.new_empty(len(x) * self._scratch)
        operators().vs_shared_mlp(
            int(x.dtype == torch.bfloat16),
            *self._addresses,
            self._chosen,
            self._act,
            x.data_ptr(),
            len(x),
            out.data_ptr(),
            scratch.data_ptr(),
        )
        return out
