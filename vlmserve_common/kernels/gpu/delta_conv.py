"""The convolutions of gated delta nets: over chunks of prompts, and over the few tokens of requests that decode.

They round where `compute.delta_rule.causal_conv` does. A token's result does not depend on what is computed with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlmserve_common.compute.delta_rule import CHUNK, ChunkTable
from vlmserve_common.kernels.gpu.common import rounded

_TILE, _CHANNELS = 64, 256  # channels of a program: of a chunk's tile, and of a row


def convolve_chunks(
    x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, table: ChunkTable, out: torch.Tensor
) -> None:
    """Convolve the tokens of a table's spans, and leave the last inputs in the states that are to keep them.

    x, out [N, channels], weight [channels, width], states [states, width - 1, channels]: of one dtype, rows
    contiguous; x's rows and states lie apart by any stride. Other rows of `out` are not written.
    """
    channels, width = weight.shape
    shared = (x, x.stride(0), states, states.stride(0), table.chunks)
    convolve_chunks_kernel[len(table.chunks), triton.cdiv(channels, _TILE)](
        *shared, weight, out, channels, WIDTH=width, ROWS=CHUNK, BLOCK=_TILE, num_warps=4
    )
    # only now: all chunks have read the states before
    keep_inputs_kernel[len(table.starts) - 1, triton.cdiv(channels, _CHANNELS)](
        *shared, table.starts, channels, WIDTH=width, BLOCK=_CHANNELS, num_warps=4
    )


def convolve_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor | None,
    out: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Convolve T tokens of each of n requests. x, weight, states, out: as for `convolve_chunks`.

    rows: int64 [n], their states. tokens: int64 [n, T] of x; None for the first n, one each. Without `kept`, T is 1,
    and states take in the tokens; padding may have one state several times. kept: [places, width - 1 + T or more,
    channels] and int64 [n], the places that get all inputs instead, the state's first.
    """
    channels, width = weight.shape
    length = 1 if tokens is None else tokens.shape[1]
    assert kept is not None or length == 1
    inputs, places = (None, None) if kept is None else kept
    convolve_few_kernel[len(rows), triton.cdiv(channels, _CHANNELS)](
        x,
        x.stride(0),
        states,
        states.stride(0),
        weight,
        rows.contiguous(),
        None if tokens is None else tokens.contiguous(),
        length,
        inputs,
        0 if inputs is None else inputs.stride(0),
        None if places is None else places.contiguous(),
        out,
        channels,
        WIDTH=width,
        BLOCK=_CHANNELS,
        num_warps=4,
    )


@triton.jit
def _activated(total: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """SiLU of a sum that is rounded before and behind."""
    total = rounded(total, dtype).to(tl.float32)
    return rounded(total / (1.0 + tl.exp(-total)), dtype)


@triton.jit
def convolve_chunks_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    states: tl.tensor,
    state_stride: tl.tensor,
    chunks: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some channels of a chunk a program."""
    chunk = chunks + 5 * tl.program_id(0)
    begin = tl.load(chunk)
    end = tl.load(chunk + 1)
    first = tl.load(chunk + 2)
    before = states + tl.load(chunk + 3).to(tl.int64) * state_stride
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = begin + tl.arange(0, ROWS)
    there = (token < end)[:, None] & (channel < channels)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        at = token + (tap - (WIDTH - 1))
        own = (at >= first)[:, None]
        place = at.to(tl.int64)[:, None]
        older = before + (place - first + (WIDTH - 1)) * channels + channel[None, :]
        value = tl.load(x + place * x_stride + channel[None, :], mask=there & own, other=0.0).to(tl.float32)
        value += tl.load(older, mask=there & (own == 0), other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * WIDTH + tap, mask=channel < channels, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    to = out + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(to, _activated(total, out.dtype.element_ty), mask=there)


@triton.jit
def keep_inputs_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    states: tl.tensor,
    state_stride: tl.tensor,
    chunks: tl.tensor,
    starts: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some channels of a span a program: the inputs behind each of its chunks that is kept, its own state last."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    for number in range(tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)):
        chunk = chunks + 5 * number
        target = tl.load(chunk + 4)
        if target >= 0:
            end = tl.load(chunk + 1)
            first = tl.load(chunk + 2)
            before = states + tl.load(chunk + 3).to(tl.int64) * state_stride
            to = states + target.to(tl.int64) * state_stride
            for row in tl.static_range(WIDTH - 1):
                at = end - (WIDTH - 1) + row
                # a row is read before it is written: what goes to it comes from a later one
                if at >= first:
                    value = tl.load(x + at.to(tl.int64) * x_stride + channel, mask=inside, other=0.0)
                else:
                    older = before + (at - first + (WIDTH - 1)) * channels + channel
                    value = tl.load(older, mask=inside, other=0.0)
                tl.debug_barrier()
                tl.store(to + row * channels + channel, value, mask=inside)


@triton.jit(do_not_specialize=["length"])
def convolve_few_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    states: tl.tensor,
    state_stride: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    length: tl.tensor,
    kept: tl.tensor,
    kept_stride: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some channels of a request a program."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    before = states + tl.load(rows + request) * state_stride + channel
    for place in range(length):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            at = place + tap - (WIDTH - 1)
            if at >= 0:
                if tokens is None:
                    token = request.to(tl.int64)
                else:
                    token = tl.load(tokens + request * length + at)
                value = tl.load(x + token * x_stride + channel, mask=inside, other=0.0)
            else:
                value = tl.load(before + (at + (WIDTH - 1)) * channels, mask=inside, other=0.0)
            factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            total += value.to(tl.float32) * factor
        token = request.to(tl.int64) if tokens is None else tl.load(tokens + request * length + place)
        tl.store(out + token * channels + channel, _activated(total, out.dtype.element_ty), mask=inside)
        if kept is not None:
            to = kept + tl.load(places + request) * kept_stride + channel
            newest = tl.load(x + token * x_stride + channel, mask=inside, other=0.0)
            tl.store(to + (place + (WIDTH - 1)) * channels, newest, mask=inside)
    if kept is not None:
        behind = kept + tl.load(places + request) * kept_stride + channel
        for row in tl.static_range(WIDTH - 1):
            tl.store(behind + row * channels, tl.load(before + row * channels, mask=inside, other=0.0), mask=inside)
    else:
        own = request.to(tl.int64) if tokens is None else tl.load(tokens + request)
        for row in tl.static_range(WIDTH - 1):
            if row < WIDTH - 2:
                moved = tl.load(before + (row + 1) * channels, mask=inside, other=0.0)
            else:
                moved = tl.load(x + own * x_stride + channel, mask=inside, other=0.0)
            tl.debug_barrier()
            tl.store(before + row * channels, moved, mask=inside)
