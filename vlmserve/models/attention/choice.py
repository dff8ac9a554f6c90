"""Chooses the attention of a server: the first backend that passes its trial here, or the one that is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch

from vlmserve.models.attention.base import AttentionBackend, AttentionSpec
from vlmserve.models.attention.native_backend import NativeAttentionBackend
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve.models.attention.trial import check_device, reason, run_trial
from vlmserve_common.compute.fp8 import FP8_CAPABILITY
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.attention import can_attend

log = logging.getLogger(__name__)

BackendName = Literal["auto", "native", "torch", "triton", "flashinfer"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A backend for GPUs. make: makes it, and may raise anything. lacks: returns why it is impossible, as far as that
    is known before."""

    name: str
    make: Callable[[AttentionSpec], AttentionBackend]
    lacks: Callable[[AttentionSpec], str | None] = lambda spec: None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result of trying a candidate: a backend ready for use, or why not."""

    name: str
    backend: AttentionBackend | None = None
    why_not: str | None = None


def _flashinfer(spec: AttentionSpec) -> AttentionBackend:
    import_module("flashinfer")  # fails before the log line if the package is missing
    from vlmserve.models.attention.flashinfer_backend import FlashInferAttentionBackend

    log.info("attention by flashinfer is tried: kernels that are not built yet are built now, which takes minutes")
    return FlashInferAttentionBackend(spec)


def _flashinfer_lacks(spec: AttentionSpec) -> str | None:
    from vlmserve.models.attention.flashinfer_backend import lacks

    return lacks(spec, torch.cuda.get_device_capability(spec.device) if spec.device.type == "cuda" else None)


def _triton_lacks(spec: AttentionSpec) -> str | None:
    if spec.cache_dtype != torch.float8_e4m3fn or spec.device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(spec.device)
    if capability >= FP8_CAPABILITY:
        return None
    return f"it reads 8-bit floats from compute capability 8.9 on, and this GPU has {capability[0]}.{capability[1]}"


def _triton(spec: AttentionSpec) -> AttentionBackend:
    from vlmserve.models.attention.triton_backend import TritonAttentionBackend

    return TritonAttentionBackend(spec)


FLASHINFER = Candidate(name="flashinfer", make=_flashinfer, lacks=_flashinfer_lacks)
TRITON = Candidate(name="triton", make=_triton, lacks=_triton_lacks)
FOR_GPUS = (FLASHINFER, TRITON)
"""Best first. Behind them comes torch, which is always possible."""


def choose_backend(
    setting: BackendName, spec: AttentionSpec, candidates: Sequence[Candidate] = FOR_GPUS
) -> AttentionBackend:
    """Choose a backend. auto is, on a CPU, our own operators if possible; on a GPU the first candidate that passes its
    trial; otherwise torch. EngineError if the backend asked for is impossible."""
    if setting == "native" or (setting == "auto" and spec.device.type == "cpu"):
        return _on_a_cpu(setting, spec)
    if setting == "torch":
        return TorchAttentionBackend()
    if setting != "auto":
        return _asked_for(setting, spec, candidates)
    passed_over: list[Tried] = []
    for candidate in candidates:
        tried = try_candidate(candidate, spec)
        if tried.backend is not None:
            _tell(tried.name, passed_over)
            return tried.backend
        passed_over.append(tried)
    _tell("torch, which is slow on a GPU", passed_over)
    return TorchAttentionBackend()


def try_candidate(candidate: Candidate, spec: AttentionSpec) -> Tried:
    """Make it, and let it compute. EngineError if that breaks the GPU for the rest of this process."""
    why_not = candidate.lacks(spec)
    if why_not is not None:
        return Tried(name=candidate.name, why_not=why_not)
    try:
        backend = candidate.make(spec)
        run_trial(backend, spec)
    except Exception as error:  # compilers, drivers and foreign packages may fail in any way
        check_device(spec.device, candidate.name)
        return Tried(name=candidate.name, why_not=reason(error))
    return Tried(name=candidate.name, backend=backend)


def _on_a_cpu(setting: BackendName, spec: AttentionSpec) -> AttentionBackend:
    possible = spec.device.type == "cpu" and can_attend(spec.dtype, spec.cache_dtype, spec.head_dim)
    if setting == "native" and not possible:
        raise EngineError(
            f"--attention-backend native needs our own operators (--cpu-kernels) on a CPU, float32 or bfloat16, and "
            f"heads of 16, 32 ... 256 elements; here it is {spec.device}, {dtype_name(spec.dtype)} and {spec.head_dim}"
        )
    return NativeAttentionBackend() if possible else TorchAttentionBackend()


def _asked_for(setting: BackendName, spec: AttentionSpec, candidates: Sequence[Candidate]) -> AttentionBackend:
    interpreted = setting == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if spec.device.type == "cpu" and not interpreted:
        raise EngineError(
            f"--attention-backend {setting} is for GPUs, and the model is on {spec.device}; for a CPU there are native "
            "and torch"
        )
    tried = try_candidate(next(each for each in candidates if each.name == setting), spec)
    if tried.backend is None:
        raise EngineError(
            f"--attention-backend {setting} cannot be used here: {tried.why_not}; auto takes the best that can"
        )
    return tried.backend


def _tell(name: str, passed_over: Sequence[Tried]) -> None:
    others = "; ".join(f"not {each.name}: {each.why_not}" for each in passed_over)
    log.info("attention by %s%s", name, f" ({others})" if others else "")
