"""Routing: the choice of each token's experts, and the order in which rows are multiplied. Nothing is read by the host,
and shapes depend on the number of tokens alone: a CUDA graph may hold it all.

A plan has the rows of each expert next to each other, in blocks of one expert each; row i is token i // chosen in its
(i % chosen)-th expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.common import rounded

_SCANNED = 1024  # rows that a program looks at at a time


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows of each expert, in blocks. order int32 [rows]: rows, sorted by expert. blocks int32 [most, 3]: each
    block's expert, its first place in `order`, and its number of rows, 0 for blocks that are not needed. size: rows of
    a block at the most."""

    order: torch.Tensor
    blocks: torch.Tensor
    size: int


def route(logits: torch.Tensor, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.packed_linear.route`; ids are int32."""
    rows, experts = logits.shape
    ids = torch.empty((rows, chosen), dtype=torch.int32, device=logits.device)
    scores = torch.empty((rows, chosen), dtype=logits.dtype, device=logits.device)
    if rows:
        route_kernel[(rows,)](
            logits,
            ids,
            scores,
            EXPERTS=experts,
            CHOSEN=chosen,
            BLOCK=triton.next_power_of_2(experts),
            BLOCK_CHOSEN=triton.next_power_of_2(chosen),
            num_warps=1,
        )
    return ids, scores


@triton.jit
def route_kernel(
    logits: tl.tensor,
    ids: tl.tensor,
    scores: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
) -> None:
    """A token a program."""
    row = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    x = tl.load(logits + row * EXPERTS + experts, mask=experts < EXPERTS, other=float("-inf")).to(tl.float32)
    odds = tl.exp(x - tl.max(x, 0))
    odds = tl.where(experts < EXPERTS, odds / tl.sum(odds, 0), -1.0)
    found = tl.zeros((BLOCK_CHOSEN,), dtype=tl.int32)
    best = tl.zeros((BLOCK_CHOSEN,), dtype=tl.float32)
    for place in tl.static_range(CHOSEN):
        most = tl.max(odds, 0)
        which = tl.min(tl.where(odds == most, experts, EXPERTS - 1), 0)  # of NaN the last: it is there, too
        found = tl.where(places == place, which, found)
        best = tl.where(places == place, most, best)
        odds = tl.where(experts == which, -2.0, odds)
    best /= tl.sum(best, 0)
    inside = places < CHOSEN
    tl.store(ids + row * CHOSEN + places, found, mask=inside)
    tl.store(scores + row * CHOSEN + places, rounded(best, scores.dtype.element_ty), mask=inside)


def make_plan(ids: torch.Tensor, experts: int, size: int) -> Plan:
    """For ids int32 [N, chosen], below `experts`, in blocks of at most `size` rows. Rows whose id is below 0 are in
    none."""
    rows = ids.numel()
    most = min(experts, rows) + rows // size
    order = torch.empty(rows, dtype=torch.int32, device=ids.device)
    blocks = torch.empty((most, 3), dtype=torch.int32, device=ids.device)
    if rows:
        plan_kernel[(experts,)](
            ids,
            order,
            blocks,
            rows,
            most,
            EXPERTS=experts,
            SIZE=size,
            BLOCK=triton.next_power_of_2(experts),
            SCANNED=_SCANNED,
            num_warps=4,
        )
    return Plan(order=order, blocks=blocks, size=size)


@triton.jit(do_not_specialize=["rows", "most"])
def plan_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    rows: tl.tensor,
    most: tl.tensor,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCANNED: tl.constexpr,
) -> None:
    """An expert a program: it counts the rows of all, and puts its own behind those of the experts before it."""
    expert = tl.program_id(0)
    experts, scanned = tl.arange(0, BLOCK), tl.arange(0, SCANNED)
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, rows, SCANNED):
        found = tl.load(ids + first + scanned, mask=first + scanned < rows, other=-1)
        counts += tl.histogram(tl.maximum(found, 0), BLOCK, mask=found >= 0)
    before, needed = experts < expert, (counts + SIZE - 1) // SIZE
    start = tl.sum(tl.where(before, counts, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    first_block = tl.sum(tl.where(before, needed, 0), 0)
    placed = start
    for first in range(0, rows, SCANNED):
        own = (tl.load(ids + first + scanned, mask=first + scanned < rows, other=-1) == expert).to(tl.int32)
        tl.store(order + placed + tl.cumsum(own, 0) - 1, first + scanned, mask=own > 0)
        placed += tl.sum(own, 0)
    for done in range(0, count, SIZE):
        block = blocks + (first_block + done // SIZE) * 3
        tl.store(block, expert)
        tl.store(block + 1, start + done)
        tl.store(block + 2, tl.minimum(SIZE, count - done))
    if expert == 0:
        for block in range(tl.sum(needed, 0), most):
            tl.store(blocks + block * 3 + 2, 0)
