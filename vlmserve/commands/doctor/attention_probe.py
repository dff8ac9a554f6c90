"""Attention backends tried on the first GPU, as a start of the server would try them."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vlmserve.models.attention.base import AttentionSpec
from vlmserve.models.attention.choice import FOR_GPUS, try_candidate


def examine() -> dict[str, Any]:
    """device: None where there is no GPU, and nothing is tried. Else versions of packages (None: not installed), the C
    compiler that Triton takes (None: there is none), what each backend lacks (None: it works), best first, and the one
    that --attention-backend auto takes. heads: of the model that it is tried for."""
    if not torch.cuda.is_available():
        return {"device": None}
    spec = _spec(torch.device("cuda:0"))
    why_not = {candidate.name: try_candidate(candidate, spec).why_not for candidate in FOR_GPUS}
    return {
        "device": str(spec.device),
        "heads": str(spec),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "versions": {"flashinfer": _version("flashinfer-python"), "triton": _version("triton")},
        "why_not": why_not,
        "backend": next((name for name, why in why_not.items() if why is None), "torch"),
    }


def _spec(device: torch.device) -> AttentionSpec:
    """Of Qwen3-VL-8B."""
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return AttentionSpec(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        scaling=128**-0.5,
        dtype=dtype,
        cache_dtype=dtype,
        page_size=16,
        device=device,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
