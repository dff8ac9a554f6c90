"""What the device reaches at the two things that everything else is made of: moving bytes, and multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vlmserve.commands.bench.vision_subject import finish

_COPIES, _PRODUCTS = 8, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """bandwidth: bytes read and written in a second by a copy inside the device's memory. flops: a second, of the
    fastest product of two random square matrices, which has `rows` rows."""

    bandwidth: float
    flops: float
    rows: int


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, *, copy_bytes: int, gemms: Sequence[int], rounds: int
) -> Ceilings:
    """copy_bytes: of the copied buffer, many times what caches hold. gemms: rows of the products that are tried. The
    best of all rounds counts. Random data: zeros multiply faster."""
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=device, generator=generator)
    target = torch.empty_like(source)
    copying = min(_seconds(device, partial(target.copy_, source), _COPIES) for _ in range(rounds + 1))
    del source, target
    best = (0.0, 0)
    for rows in gemms:
        a, b = (torch.randn(rows, rows, device=device, generator=generator).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        for _ in range(rounds + 1):
            seconds = _seconds(device, partial(torch.mm, a, b, out=out), _PRODUCTS)
            best = max(best, (2.0 * rows**3 / seconds, rows))
    return Ceilings(bandwidth=2.0 * copy_bytes / copying, flops=best[0], rows=best[1])


def _seconds(device: torch.device, run: Callable[[], object], times: int) -> float:
    """Of one of so many calls, launched together."""
    finish(device)
    before = time.perf_counter()
    for _ in range(times):
        run()
    finish(device)
    return (time.perf_counter() - before) / times
