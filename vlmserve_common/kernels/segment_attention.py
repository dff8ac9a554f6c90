"""Attention inside segments of a packed batch; see `cpp/segment_attention.cpp`."""

from __future__ import annotations

import torch

from vlmserve_common.kernels.library import active, operators, pointer

BLOCK_PATCHES = 16
"""Patches that are packed together: those of a segment from its begin on."""
_PIECE_PATCHES = 96
_LARGEST_DIM = 128


def can_attend(qkv: torch.Tensor) -> bool:
    """Whether the library is there for queries, keys and values [P, 3, heads, dim]."""
    dim = qkv.shape[-1]
    supported = qkv.dtype in (torch.bfloat16, torch.float32) and dim % 2 == 0 and dim <= _LARGEST_DIM
    return active() is not None and qkv.is_cpu and supported


class SegmentAttention:
    """Attention inside segments, in several calls: `pack` the keys and values of all, then `attend`.

    Queries and keys are turned by their positions, if there are any; scores are divided by sqrt(dim). A patch's result
    depends on its own segment only, bit for bit.

    qkv [P, 3, heads, dim]; cos and signed sin (`compute.rotary.rotation`) float32 [P, 1, dim], or None; bounds int64
    [segments + 1] on the CPU: where segments begin among the P patches, and the end of the last. out [P, heads, dim] in
    the dtype of qkv: the result.

    pieces: how many there are for `attend`: 96 queries of one head, or fewer at the end of a segment; head by head in a
    segment. threads: that share a call's pieces.
    """

    def __init__(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor | None,
        signed_sin: torch.Tensor | None,
        bounds: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        lib = operators()
        assert all(tensor.is_contiguous() for tensor in (qkv, cos, signed_sin, bounds, out) if tensor is not None)
        _, _, heads, dim = qkv.shape
        narrow = int(qkv.dtype == torch.bfloat16)
        lengths = bounds.diff()
        blocks = int((-(-lengths // BLOCK_PATCHES)).sum())
        self.pieces = int((-(-lengths // _PIECE_PATCHES)).sum()) * heads
        self.threads: int = lib.vs_threads()
        memory = torch.empty(lib.vs_segment_memory(narrow, heads, dim, blocks), dtype=torch.uint8)
        self._lib = lib
        self._tensors = (qkv, cos, signed_sin, bounds, memory, out)  # kept: the library has their addresses
        self._arguments = (
            narrow,
            qkv.data_ptr(),
            pointer(cos),
            pointer(signed_sin),
            heads,
            dim,
            bounds.data_ptr(),
            len(bounds) - 1,
            memory.data_ptr(),
        )

    def pack(self, first: int, last: int) -> None:
        """Pack the patches from `first` to `last`: multiples of BLOCK_PATCHES from the begin of their segments, or the
        end of one."""
        self._lib.vs_segment_pack(*self._arguments, first, last)

    def attend(self, first: int, last: int) -> None:
        """Compute the pieces from number `first` to `last`."""
        self._lib.vs_segment_attend(*self._arguments, first, last, self._tensors[-1].data_ptr())
