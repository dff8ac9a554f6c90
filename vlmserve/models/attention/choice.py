"""Chooses the attention of a server: the first backend that passes its trial here, or the one that is asked for.

Kernels are built late, and a build may fail or compute nonsense. A trial is a prompt, a longer prompt and a decode step
of requests that share nothing, with the model's heads and types. Plain torch computes the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, AttentionSpec, ForwardBatch, ForwardMode, RadixAttention
from vlmserve.models.attention.native_backend import NativeAttentionBackend
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve_common.compute.fp8 import FP8_CAPABILITY
from vlmserve_common.compute.rotary import rotation
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError, first_line
from vlmserve_common.installing import install
from vlmserve_common.kernels.attention import can_attend

log = logging.getLogger(__name__)

# Requests of a step: tokens before it, and in it.
_STEPS = ([(0, 7), (18, 5), (33, 1)], [(0, 1), (16, 1), (40, 1)])
_SEED = 20

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
    why_not = "it has no sliding windows" if spec.windows else candidate.lacks(spec)
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


class WrongAnswerError(Exception):
    """A backend's answer differs from plain torch's."""


def run_trial(backend: AttentionBackend, spec: AttentionSpec) -> None:
    """Returns if all is well. Raises WrongAnswerError, and whatever the backend raises."""
    for step in _STEPS:
        got, want = (_attend(each, spec, step) for each in (backend, TorchAttentionBackend()))
        error = ((got - want).norm() / want.norm()).item()
        if not error <= _tolerance(spec):  # nan is not, either
            raise WrongAnswerError(f"its trial gave wrong answers (off by {error:.2g} of {_tolerance(spec):g} at most)")


def check_device(device: torch.device, name: str) -> None:
    """Raise EngineError if a failed trial has broken the GPU for this process, as an illegal access does for good."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise EngineError(
            f"the trial of attention by {name} broke this process's use of {device} ({first_line(error)}): start "
            "with another --attention-backend"
        ) from error


def reason(error: Exception) -> str:
    """Say in one line why a backend cannot be used, with a remedy if one is known."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in ("flashinfer", "triton"):
        return f"{error.name} is not installed: {install('gpu')}"
    if "Failed to find C compiler" in text:  # triton.runtime.build
        return "Triton needs a C compiler, and there is none: apt-get install gcc, or set CC"
    if "nvcc" in text and any(word in text.lower() for word in ("not found", "could not find", "no such file")):
        return (
            "FlashInfer needs nvcc to build its kernels, and there is none: install the CUDA toolkit, or the package "
            "flashinfer-jit-cache, which has them built"
        )
    if "Ninja build failed" in text:  # flashinfer.jit.cpp_ext
        return f"its kernels cannot be built: {_first_error(text)}"
    if isinstance(error, WrongAnswerError):
        return text
    if type(error).__name__ == "CompilationError":  # Triton's: the place and the code come first
        return f"{type(error).__name__}: {text.strip().splitlines()[-1].strip()}"
    return f"{type(error).__name__}: {first_line(error)}"


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in lines[1:] if "error" in line.lower()), lines[0])


def _tolerance(spec: AttentionSpec) -> float:
    """Return the allowed ratio of the norm of all errors to the norm of all answers. An 8-bit cache may round otherwise
    if heads are turned in another precision."""
    if spec.cache_dtype.itemsize == 1:
        return 0.08
    return 1e-3 if spec.dtype == torch.float32 else 0.02


def _attend(backend: AttentionBackend, spec: AttentionSpec, requests: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the answers of `backend`, float32 [N, num_heads * head_dim]. requests: see `_STEPS`."""
    generator = torch.Generator().manual_seed(_SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(spec.device, spec.dtype)

    batch = _batch(backend, spec, requests, generator)
    history = torch.arange(len(batch.kv_cache.layers[0].keys), device=spec.device)
    batch.kv_cache.write(0, history, *(normal(len(history), spec.num_kv_heads, spec.head_dim) for _ in range(2)))
    tokens = sum(batch.extend_lens)
    angles = torch.randn((tokens, spec.head_dim // 2), generator=generator).to(spec.device)
    layer = RadixAttention(spec.num_heads, spec.head_dim, spec.scaling, spec.num_kv_heads, layer_id=0)
    with torch.inference_mode():
        backend.init_forward_metadata(batch)
        qkv = normal(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        return layer(qkv, rotation(angles, spec.dtype), None, batch).float()


def _batch(
    backend: AttentionBackend, spec: AttentionSpec, requests: Sequence[tuple[int, int]], generator: torch.Generator
) -> ForwardBatch:
    """Make a batch of requests whose pages lie anywhere, in a cache of one layer."""
    device, size = spec.device, spec.page_size
    totals = [prefix + extend for prefix, extend in requests]
    pages = [-(-total // size) for total in totals]
    order = 1 + torch.randperm(sum(pages), generator=generator)
    pool = ReqToTokenPool(len(requests), max(totals), device)
    written = []
    for row, ((prefix, _), total, mine) in enumerate(zip(requests, totals, order.split(pages), strict=True)):
        slots = (mine[:, None] * size + torch.arange(size)).flatten()[:total].to(device)
        pool.write(row, 0, slots)
        written.append(slots[prefix:])
    lengths = [extend for _, extend in requests]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if max(lengths) == 1 else ForwardMode.MIXED,
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
        positions=torch.zeros((3, sum(lengths)), dtype=torch.int64, device=device),
        req_pool_indices=torch.arange(len(requests), device=device),
        seq_lens=torch.tensor(totals, dtype=torch.int32, device=device),
        extend_start_loc=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device),
        prefix_lens=[prefix for prefix, _ in requests],
        extend_lens=lengths,
        out_cache_loc=torch.cat(written),
        req_to_token_pool=pool,
        kv_cache=KVCache(
            num_slots=(1 + sum(pages)) * size,
            num_layers=1,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.cache_dtype,
            device=device,
        ),
        attn_backend=backend,
    )
