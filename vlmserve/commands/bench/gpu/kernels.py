"""The GPU's fused operators beside torch's: seconds of each, and the bytes that it has to move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from vlmserve.commands.bench.figures import Spread
from vlmserve.executor.gumbel import gumbel
from vlmserve.memory.kv_cache import KVCache
from vlmserve.models.attention.positioning import positioned
from vlmserve_common.compute.layers import rms_normalise
from vlmserve_common.compute.rotary import rotation
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.attention import HeadNorms

_CALLS = 16  # in a graph
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """The sizes of a decoder layer. tokens, sampled: rows that go through it, and that are sampled, at a time."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tokens: Sequence[int]
    sampled: Sequence[int]


QWEN3_8B = LayerSizes(
    hidden=4096,
    intermediate=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    tokens=(1, 64, 8192),
    sampled=(1, 64),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFigure:
    """The seconds of a call, ours and torch's. moved: bytes, each input read once and each output written once."""

    name: str
    ours: Spread
    theirs: Spread
    moved: int


class _Pair(NamedTuple):
    name: str
    ours: Callable[[], torch.Tensor]
    theirs: Callable[[], torch.Tensor]
    moved: int


@torch.inference_mode()
def kernel_figures(
    device: torch.device, *, dtype: torch.dtype = torch.bfloat16, sizes: LayerSizes = QWEN3_8B, rounds: int = 5
) -> list[KernelFigure]:
    """Time each operator, on a GPU in CUDA graphs, as decoding runs. Needs Triton.

    Raises EngineError if an operator of ours does not agree with torch.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    made = []
    for pair in (*_layer_pairs(sizes, random), *_sampling_pairs(sizes, random)):
        _check(pair)
        replays = [_replayed(run, device) for run in (pair.ours, pair.theirs)]
        seconds = [[_seconds(replay, device) for replay in replays] for _ in range(rounds)]
        ours, theirs = (Spread.of(times) for times in zip(*seconds, strict=True))
        made.append(KernelFigure(name=pair.name, ours=ours, theirs=theirs, moved=pair.moved))
    return made


def _layer_pairs(sizes: LayerSizes, random: Callable[..., torch.Tensor]) -> Iterator[_Pair]:
    from vlmserve_common.kernels.gpu import activation as gates
    from vlmserve_common.kernels.gpu import norm

    weight = random(sizes.hidden)
    for tokens in sizes.tokens:
        x, product = random(tokens, sizes.hidden), random(tokens, 2 * sizes.intermediate)
        total = random(tokens, sizes.hidden)
        ours, theirs = partial(norm.rms_norm, x, weight, _EPS), partial(_norm, x, weight)
        yield _Pair(f"RMSNorm, {tokens} tokens", ours, theirs, 2 * x.nbytes + weight.nbytes)
        ours = partial(norm.add_rms_norm, x, total, weight, _EPS)
        theirs = partial(_add_norm, x, total.clone(), weight)
        yield _Pair(f"sum and RMSNorm, {tokens} tokens", ours, theirs, 4 * x.nbytes + weight.nbytes)
        ours, theirs = partial(gates.silu_mul, product), partial(_gate, product)
        yield _Pair(f"SwiGLU's gate, {tokens} tokens", ours, theirs, product.nbytes * 3 // 2)
        yield _positions(sizes, tokens, random)


def _positions(sizes: LayerSizes, tokens: int, random: Callable[..., torch.Tensor]) -> _Pair:
    from vlmserve_common.kernels.gpu import positions

    qkv = random(tokens, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    rotary = rotation(random(tokens, sizes.head_dim // 2, dtype=torch.float32), qkv.dtype)
    norms = HeadNorms(q_weight=random(sizes.head_dim), k_weight=random(sizes.head_dim), eps=_EPS)
    cache = KVCache(
        num_slots=tokens,
        num_layers=1,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        dtype=qkv.dtype,
        device=qkv.device,
    )
    slots = torch.arange(tokens, device=qkv.device)

    def theirs() -> torch.Tensor:
        q, k, v = positioned(qkv, rotary, norms, sizes.kv_heads)
        cache.write(0, slots, k, v)
        return q

    def ours() -> torch.Tensor:
        return positions.position_and_store(qkv, rotary, norms, slots, cache.layers[0])

    moved = 2 * qkv.nbytes + rotary[0].nbytes + slots.nbytes
    return _Pair(f"head norms, rotation and KV write, {tokens} tokens", ours, theirs, moved)


def _sampling_pairs(sizes: LayerSizes, random: Callable[..., torch.Tensor]) -> Iterator[_Pair]:
    from vlmserve_common.kernels.gpu import sampling

    for rows in sizes.sampled:
        scores = torch.log_softmax(random(rows, sizes.vocab, dtype=torch.float32), dim=-1)
        ids = torch.arange(sizes.vocab, device=scores.device)[None]
        seeds = torch.arange(rows, device=scores.device)
        ours, theirs = partial(sampling.choose, scores, None, seeds, seeds), partial(_choice, scores, ids, seeds)
        yield _Pair(f"random choice, {rows} of {sizes.vocab} tokens", ours, theirs, scores.nbytes)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_normalise(x, _EPS).mul_(weight)


def _add_norm(x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _norm(total.add_(x), weight)


def _gate(product: torch.Tensor) -> torch.Tensor:
    gates, rest = product.chunk(2, dim=-1)
    return F.silu(gates).mul_(rest)


def _choice(scores: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return (scores + gumbel(numbers[:, None], numbers[:, None], ids)).argmax(dim=-1)


def _check(pair: _Pair) -> None:
    found, wanted = pair.ours().float(), pair.theirs().float()
    off = float((found - wanted).norm() / wanted.norm().clamp(min=_EPS))
    if not off < 1e-2:
        raise EngineError(f"{pair.name}: ours is {off:.2g} away from torch's, relatively")


def _replayed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a CUDA graph of some calls of `run`; on a CPU, `run` itself."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()
    graph.replay()
    return graph.replay


def _seconds(replay: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call."""
    if device.type != "cuda":
        before = time.perf_counter()
        replay()
        return time.perf_counter() - before
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / _CALLS
