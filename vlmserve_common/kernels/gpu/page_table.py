"""The pages of a step's requests, one after the other, from the table of their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _page_indices(
    table: tl.tensor,
    table_stride: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    first = tl.load(starts + request)
    count = tl.load(starts + request + 1) - first
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = page < count
    row = tl.load(rows + request).to(tl.int64)
    slot = tl.load(table + row * table_stride + page * PAGE_SIZE, mask=there, other=0)
    tl.store(out + first + page, slot // PAGE_SIZE, mask=there)


def page_indices(
    table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, *, page_size: int, most: int
) -> None:
    """Write out int32 [starts[-1]]: the page of every page_size-th token of requests `rows` int64 [B]. table: int32
    [rows, max_context]; slots of a page are consecutive. starts int32 [B + 1]: where each request's pages begin. most:
    pages of the request that has most."""
    grid = (len(rows), triton.cdiv(most, _BLOCK))
    _page_indices[grid](table, table.stride(0), rows, starts, out, PAGE_SIZE=page_size, BLOCK=_BLOCK)
