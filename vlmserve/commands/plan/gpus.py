"""GPUs by their makers' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU: its memory in bytes, and the memory's bandwidth in bytes a second.

    `flops` and `fp8_flops` are operations a second of dense products in 16 and in 8 bits; 0 if there are none. `link`
    is in bytes a second to other GPUs, each way; 0 if not known. `is_cpu`: it is no GPU, but this machine's CPU.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    fp8_flops: float = 0.0
    link: float = 0.0
    is_cpu: bool = False


def _gpu(name: str, gib: float, tb_s: float, tflops: float, fp8_tflops: float, link_gb_s: float) -> Gpu:
    return Gpu(
        name=name,
        memory=int(gib * _GIB),
        bandwidth=tb_s * 1e12,
        flops=tflops * 1e12,
        fp8_flops=fp8_tflops * 1e12,
        link=link_gb_s * 1e9,
    )


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "a100": _gpu("A100 80GB SXM", 80, 2.039, 312, 0, 300),
        "l40s": _gpu("L40S", 45, 0.864, 362, 733, 32),
        "h100": _gpu("H100 SXM", 79.6, 3.35, 989, 1979, 450),
        "h20": _gpu("H20", 95.6, 4.0, 148, 296, 450),
        "h200": _gpu("H200 SXM", 140.4, 4.8, 989, 1979, 450),
        "b200": _gpu("B200", 179, 8.0, 2250, 4500, 900),
    }
)
"""Memory is what the driver shows. Rates are those of the data sheets, which no program reaches: nine tenths of the
bandwidth and seven to eight tenths of the operations are much. A link is half of the printed rate, which counts both
ways."""
