"""Whether Triton's interpreter runs the kernels, on a CPU. That is settled when Triton is imported."""

from __future__ import annotations

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""A kernel takes it as a constexpr where it multiplies matrices: the interpreter's `tl.dot` is exact in float32 and
float16 and plainly wrong in bfloat16, so there bfloat16 is widened first."""
