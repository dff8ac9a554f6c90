"""Matrix products with weights, and where 16-bit ones are computed on a CPU.

Without 16-bit instructions torch's bfloat16 and float16 products run at the same ~20 GFLOP/s however many rows there
are. From a few rows on it pays to widen a block of weight rows at a time to float32, into a buffer that is reused, and
to multiply that. This gives 70 GFLOP/s at 16 rows, and over 120 from 90 (2 cores with AVX2). A product of one row is
bound by reading the weights, and the native product reads half as much. The block is the left operand: the libraries
are twice as fast with a tall left and a narrow right operand as the other way round. They are fastest at multiples of
16 columns. Either way accumulation is in float32 and the result is rounded once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve_common.compute.activations import Activation
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.fp8 import FP8, Fp8Scales
from vlmserve_common.compute.int_weights import IntWeights
from vlmserve_common.compute.shard import Cut, Cuts, Shard
from vlmserve_common.kernels import packed_linear as packed_products
from vlmserve_common.kernels.packed_linear import PackedWeight
from vlmserve_common.kernels.quantized import (
    MODE_BITS,
    Mode,
    QuantizedWeight,
    can_quantize,
    pack_quantized,
    quantize,
    requantize,
)

if TYPE_CHECKING:
    from vlmserve_common.compute.lora import ActiveAdapters

# Rows of x up to which the native 16-bit product is faster.
NATIVE_ROWS = 4
COLUMN_MULTIPLE = 16
# x is taken in parts of this many rows, which bounds the float32 copies of x and of the result's block.
MAX_COLUMNS = 1024
BLOCK_ROWS = 512
BLOCK_ELEMENTS = 1 << 20


class Workspace(threading.local):
    """A float32 buffer that products share, one a thread; it grows to the largest block and stays."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """An uninitialised float32 [rows, columns] on the CPU, valid until the next call."""
        if self._buffer.numel() < rows * columns:
            self._buffer = torch.empty(rows * columns, dtype=torch.float32, device="cpu")
        return self._buffer[: rows * columns].view(rows, columns)


def _cpu_flags() -> Mapping[str, object]:
    # newer than the oldest torch we run with; without it, torch's own products are right, if slow
    probe: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    return probe()


@functools.cache
def has_native_products(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of a 16-bit dtype in hardware, or is a kind that was not measured."""
    flags = _cpu_flags()
    if flags.get("architecture") != "x86_64":
        return True
    suffix = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    return suffix is None or bool(flags.get(f"avx512_{suffix}") or flags.get(f"amx_{suffix}"))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, workspace: Workspace | None = None
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N]; all of one dtype. Inference only.

    workspace: where 16-bit weights are widened; a buffer is allocated for the call without one.
    """
    if x.dtype == torch.float32 or not x.is_cpu or len(x) <= NATIVE_ROWS or has_native_products(x.dtype):
        return F.linear(x, weight, bias)
    return _widened_linear(x, weight, bias, workspace or Workspace())


def _widened_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, workspace: Workspace
) -> torch.Tensor:
    """`linear` for x [M, K] by blocks of weight rows in float32."""
    total, inner = x.shape
    outer = weight.shape[0]
    block_rows = min(BLOCK_ROWS, max(COLUMN_MULTIPLE, BLOCK_ELEMENTS // inner))
    out = torch.empty((total, outer), dtype=x.dtype)
    for first in range(0, total, MAX_COLUMNS):
        part = x[first : first + MAX_COLUMNS]
        columns = len(part)
        padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        right = torch.zeros((inner, padded), dtype=torch.float32) if padded > columns else torch.empty((inner, padded))
        right[:, :columns] = part.t()
        product = torch.empty((min(block_rows, outer), padded), dtype=torch.float32)
        for row in range(0, outer, block_rows):
            block = weight[row : row + block_rows]
            wide = workspace.take(len(block), inner).copy_(block)
            result = product[: len(block)]
            if bias is None:
                torch.mm(wide, right, out=result)
            else:
                torch.addmm(bias[row : row + block_rows].float()[:, None], wide, right, out=result)
            out[first : first + columns, row : row + len(block)] = result[:, :columns].t()
    return out


class Linear(nn.Module):
    """`linear` with its weight [out_features, in_features] and bias; uninitialised, inference only.

    gated: the first half of the outputs, through the activation, are gates of the other half. adapters: what active
    adapters add to it, under which name; see `compute.lora`.
    """

    adapters: tuple[ActiveAdapters, str] | None = None
    weight: nn.Parameter | None
    may_be_quantised = True
    """Whether `pack` may quantise it: False for few outputs that matter much."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, gated: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.gated = gated
        self.workspace: Workspace | None = None
        self.packed: PackedWeight | None = None
        self.fp8: Fp8Scales | None = None
        self.ints: IntWeights | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        if self.fp8 is not None:
            return self.fp8.dtype
        if self.ints is not None:
            return self.ints.form.dtype
        return self.packed.dtype if self.weight is None else self.weight.dtype  # type: ignore[union-attr]

    def pack(self, mode: Mode | None = None) -> None:
        """Lay the weight out for this process's operators, if these can use it; the plain one goes.

        mode: how the weight is quantised, if it can be.
        """
        if self.weight is not None and packed_products.can_pack(self.weight):
            mode = mode if self.may_be_quantised else None
            self.packed = pack_weight(self.weight, self.bias, mode, gated=self.gated)
            self.weight = self.bias = None

    def take(self, weight: QuantizedWeight) -> None:
        """Compute with a quantised weight, which `can_pack_quantized`, in place of the one before, which goes."""
        self.packed = pack_quantized(weight, self.bias, self.dtype, gated=self.gated)
        self.weight = self.bias = self.ints = None

    def hold_ints(self, ints: IntWeights) -> None:
        """Have a weight of whole numbers, uninitialised, in place of the plain one, which goes."""
        self.weight, self.ints = None, ints

    def hold_fp8(self, scales: Fp8Scales) -> None:
        """Have a weight of 8-bit floats, uninitialised, in place of the plain one, which goes."""
        assert self.weight is not None
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=FP8), requires_grad=False)
        self.fp8 = scales

    def scale(self, by: float) -> bool:
        """Multiply the product, without its bias, by a power of two. Return False for a weight of integers."""
        if self.weight is None:
            return False
        (self.weight if self.fp8 is None else self.fp8.weights).mul_(by)
        return True

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n, inputs] of the stored weight with the inputs in the order in which they are packed."""
        return rows

    def forward(
        self, x: torch.Tensor, act: Activation | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [M, in_features] -> residual + act(product) [M, out_features]; gated: + act(gates) * rest, half as wide."""
        added = self._added(x)
        if self.packed is not None:
            name = "" if act is None else act.name
            return packed_products.linear(x, self.packed, act=name, residual=residual, added=added)
        if self.ints is not None:
            out = self.ints.product(x, self.bias)
        else:
            assert self.weight is not None
            if self.fp8 is None:
                out = linear(x, self.weight, self.bias, self.workspace)
            else:
                out = self.fp8(x, self.weight, self.bias)
        if added is not None:
            out = out.add_(added)
        if self.gated:
            assert act is not None
            out = act.gate(out)
        elif act is not None:
            out = act(out)
        return out if residual is None else out.add_(residual)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write `forward` of x to out [M, out_features], whose rows may lie apart."""
        if self.packed is None:
            out.copy_(self(x))
        else:
            packed_products.linear(x, self.packed, added=self._added(x), out=out)

    def _added(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.adapters is None or not self.adapters[0].adapters:
            return None
        active, name = self.adapters
        return active.added((name, 0), x)


class MergedLinear(Linear):
    """Several projections of one input as one product. Checkpoints store them side by side under their own names.

    parts: name -> output features, in the order of the output; or this process's cut of them.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int | Cut | Cuts], *, bias: bool, gated: bool = False
    ) -> None:
        self.parts = {name: part if isinstance(part, int) else part.size for name, part in parts.items()}
        self._cuts = {name: part for name, part in parts.items() if not isinstance(part, int)}
        super().__init__(in_features, sum(self.parts.values()), bias=bias, gated=gated)

    def scale_parts(self, by: Mapping[str, float]) -> bool:
        """Multiply parts of the output by powers of two. Return False for a weight of integers."""
        if self.weight is None:
            return False
        start = 0
        for part, size in self.parts.items():
            rows = slice(start, start + size)
            start += size
            if self.fp8 is None:
                self.weight[rows].mul_(by.get(part, 1.0))
            else:
                self.fp8.of_rows(rows).mul_(by.get(part, 1.0))
            if self.bias is not None:
                self.bias[rows].mul_(by.get(part, 1.0))
        return True

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights`: `a.qkv_proj` is stored as `a.q_proj` and so on."""
        parent = name.rpartition(".")[0]
        for leaf, parameter in self.named_parameters(recurse=False):
            pieces = parameter.split(list(self.parts.values()))
            for part, piece in zip(self.parts, pieces, strict=True):
                yield f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}", piece

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cut | Cuts]]:
        """See `checkpoint.weights`."""
        parent = name.rpartition(".")[0]
        for leaf, _ in self.named_parameters(recurse=False):
            for part, cut in self._cuts.items():
                yield f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}", cut


class RowLinear(Linear):
    """A product whose inputs are spread over processes. Each has some columns of the weight, and the partial products
    are added up over all. in_features: of all processes together. summed: False if the caller adds them up."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, comm: Communicator, what: str, summed: bool = True
    ) -> None:
        assert summed or not bias
        self.cut = comm.shard.cut(in_features, what, dim=1)
        self._summed = summed
        super().__init__(self.cut.size, out_features, bias=False)
        # added once, behind the sum
        self.sum_bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._comm = comm

    def forward(
        self, x: torch.Tensor, act: Activation | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Linear.forward`; without an activation."""
        assert act is None
        out = super().forward(x)
        if self._summed:
            out = self._comm.all_reduce(out)
        if self.sum_bias is not None:
            out += self.sum_bias
        return out if residual is None else out.add_(residual)

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights`."""
        for leaf, parameter in self.named_parameters(recurse=False):
            yield f"{name}.{leaf.removeprefix('sum_')}", parameter

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cut]]:
        """See `checkpoint.weights`."""
        yield f"{name}.weight", self.cut


class VocabLinear(Linear):
    """A head for this process's part of a vocabulary, without bias. All processes have the same number of rows."""

    def __init__(self, in_features: int, vocab_size: int, shard: Shard) -> None:
        self.cut, rows = shard.cut_vocab(vocab_size)
        super().__init__(in_features, rows, bias=False)

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights`."""
        if self.weight is not None:
            yield f"{name}.weight", self.weight[: self.cut.size]

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cut]]:
        """See `checkpoint.weights`."""
        yield f"{name}.weight", self.cut


def row_linear(
    in_features: int, out_features: int, *, bias: bool, comm: Communicator, what: str, summed: bool = True
) -> Linear:
    """Make a product whose inputs are spread over processes. what: the name of in_features, for errors. summed: see
    `RowLinear`."""
    if comm.shard.is_whole:
        return Linear(in_features, out_features, bias=bias)
    return RowLinear(in_features, out_features, bias=bias, comm=comm, what=what, summed=summed)


class PatchProjection(Linear):
    """A convolution whose stride is its kernel, as a product over flattened patches; stored with the kernel's shape.

    kernel: (channels, frames, height, width) of a patch.
    """

    def __init__(self, kernel: tuple[int, int, int, int], out_features: int, *, bias: bool) -> None:
        channels, frames, height, width = kernel
        super().__init__(channels * frames * height * width, out_features, bias=bias)
        self.kernel = kernel

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights`."""
        if self.weight is not None:
            yield f"{name}.weight", self.weight.view(-1, *self.kernel)
        if self.bias is not None:
            yield f"{name}.bias", self.bias


def pack_weight(
    weight: torch.Tensor, bias: torch.Tensor | None, mode: Mode | None, *, gated: bool = False
) -> PackedWeight:
    """See `Linear.pack`; for weights that `can_pack`."""
    if mode is not None and can_quantize(weight, mode):
        return pack_quantized(quantize(weight, mode), bias, weight.dtype, gated=gated, mode=mode)
    return packed_products.pack(weight, bias, gated=gated)


def rewrite_rows(packed: PackedWeight, first: int, rows: torch.Tensor, *, index: int = 0) -> None:
    """Put other rows [n, inner] in the place of those from number `first` on, in the way of `pack_weight`. index: which
    of several weights in one."""
    if packed.kind in MODE_BITS:
        requantize(packed, first, rows, index=index)
    else:
        packed_products.repack(packed, first, rows.to(packed.dtype), index=index)


def pack_linears(module: nn.Module, mode: Mode | None = None) -> None:
    """Let all `Linear`s in `module` use this process's operators; see `Linear.pack`."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.pack(mode)


def share_workspace(module: nn.Module) -> None:
    """Let all `Linear`s in `module` use one buffer."""
    workspace = Workspace()
    for child in module.modules():
        if isinstance(child, Linear):
            child.workspace = workspace
