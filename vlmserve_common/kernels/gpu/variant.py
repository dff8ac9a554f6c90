"""A kernel as it is compiled for one set of dtypes and shapes: for tests and tables that need no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""What Triton calls a tensor's elements."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """name: unique, for people. kernel: a function under `triton.jit`.

    signature: Triton's types of the arguments at run time, in order; "*bf16:16" and "i32:16" are a pointer and a number
    that are known to be multiples of 16, as those of tensors are that are launched. constexprs: the other arguments.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, object] = field(default_factory=dict)


def pointer(dtype: torch.dtype) -> str:
    """The type of a tensor argument whose memory is aligned, as torch's is."""
    return f"*{TYPES[dtype]}:16"
