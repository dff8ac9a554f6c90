"""Tries an attention backend on its device: kernels are built late, and a build may fail or compute nonsense.

The trial is a prompt, a longer prompt and a decode step of requests that share nothing, with the model's heads and
types. Plain torch computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, AttentionSpec, ForwardBatch, ForwardMode, RadixAttention
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve_common.compute.rotary import rotation
from vlmserve_common.errors import EngineError

# Requests of a step: tokens before it, and in it.
_STEPS = ([(0, 7), (18, 5), (33, 1)], [(0, 1), (16, 1), (40, 1)])
_SEED = 20


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
        return f"{error.name} is not installed: pip install 'vlmserve[gpu]'"
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no reason given"


def _first_error(output: str) -> str:
    """Return the first line of a build's output that tells of an error."""
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
