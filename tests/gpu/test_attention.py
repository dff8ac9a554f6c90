"""Every attention backend against plain float32, on the shapes of real models: decoding, prompts behind prefixes, both
together, and the towers' segments."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.vlmserve_common.kernels.paged_step import PagedStep, make_step, off
from vision.towers.attention import segment_attention
from vision.towers.grids import Segments
from vision.towers.pieces import UNLIMITED, finish
from vlmserve.models.attention.base import AttentionBackend, AttentionSpec, RadixAttention
from vlmserve.models.attention.choice import choose_backend
from vlmserve_common.compute.rotary import Rotation, rotate, rotation

PAGE = 16
BACKENDS = ("torch", "triton", "flashinfer")
FLASHINFER_DIMS = (64, 128, 256)
# query heads, KV heads and elements: of Qwen3-VL-8B, Qwen2.5-VL-7B, Qwen3-VL-2B, and others
HEADS = [(32, 8, 128), (28, 4, 128), (16, 8, 128), (16, 2, 64), (4, 4, 72), (8, 1, 80), (8, 2, 96), (4, 2, 256)]
SMALL_HEADS = [(4, 2, 16), (3, 1, 24)]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
STEPS = {
    "decode": lambda random: [(int(before), 1) for before in (0, 14, 15, 16, *random.integers(1, 3000, 60))],
    "prompts": lambda random: [(0, 1000), (0, 1), (0, 16), (0, 129), (0, 2048)],
    "prefixes": lambda random: [(1024, 500), (3000, 64), (15, 33), (16, 16), (1, 700)],
    "mixed": lambda random: [*((int(n), 1) for n in random.integers(0, 2000, 20)), (0, 700), (100, 301), (31, 1)],
}
SMALL_STEPS = {
    "decode": [(0, 1), (15, 1), (16, 1), (37, 1)],
    "prompts": [(0, 17), (0, 1), (0, 16)],
    "prefixes": [(16, 5), (15, 18), (1, 3)],
    "mixed": [(20, 1), (0, 9), (17, 1), (5, 12)],
}


def requests(step: str, device: torch.device) -> list[tuple[int, int]]:
    return STEPS[step](np.random.default_rng(0)) if device.type == "cuda" else SMALL_STEPS[step]


def chosen(name: str, step: PagedStep) -> AttentionBackend:
    """A backend, by the setting's name; the test is skipped where it has no such kernels, or its package is missing."""
    _, heads, dim = step.q.shape
    dtype, cache_dtype, device = step.q.dtype, step.layer.keys.dtype, step.q.device
    if name == "flashinfer":
        if device.type != "cuda" or find_spec("flashinfer") is None:
            pytest.skip("FlashInfer is not installed, or there is no GPU")
        if dtype == torch.float32 or dim not in FLASHINFER_DIMS or cache_dtype == torch.int8:
            pytest.skip("FlashInfer has no such kernels")
    return choose_backend(
        name,
        AttentionSpec(
            num_heads=heads,
            num_kv_heads=step.layer.keys.shape[1],
            head_dim=dim,
            scaling=dim**-0.5,
            dtype=dtype,
            cache_dtype=cache_dtype,
            page_size=PAGE,
            device=device,
        ),
    )


def heads_of(device: torch.device) -> list[tuple[int, int, int]]:
    return HEADS if device.type == "cuda" else SMALL_HEADS


def paged(lengths, sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype, **more) -> PagedStep:
    """Make a step. sizes: as in `HEADS`."""
    return make_step(lengths, heads=sizes[:2], dim=sizes[2], dtype=dtype, page=PAGE, device=device, **more)


def turns(step: PagedStep) -> Rotation:
    angles = torch.randn((len(step.q), step.q.shape[2] // 2), generator=torch.Generator().manual_seed(7))
    return rotation(angles.to(step.q.device), step.q.dtype)


@torch.inference_mode()
def run(step: PagedStep, backend: AttentionBackend, rotary: Rotation) -> torch.Tensor:
    """float32 [N, heads * dim]. This step's keys and values are in the cache then."""
    _, heads, dim = step.q.shape
    batch = step.batch(backend)
    backend.init_forward_metadata(batch)
    layer = RadixAttention(heads, dim, dim**-0.5, step.layer.keys.shape[1], layer_id=0)
    return layer(step.qkv.clone(), rotary, None, batch).float()


def check(name: str, step: PagedStep, tolerance: float) -> None:
    backend, rotary, (_, heads, dim) = chosen(name, step), turns(step), step.q.shape
    found, wide = run(step, backend, rotary), [part.float() for part in rotary]
    expected = step.truth(dim**-0.5, rotate(step.q.float(), *wide)).flatten(1)
    assert off(found, expected) < tolerance, f"{heads}x{dim}, {step.lengths}"
    stored = step.cache.read(0, step.batch(backend).out_cache_loc, torch.float32)
    keys, values = step.qkv[:, heads:].float().chunk(2, dim=1)
    rounding = _ROUNDING[step.layer.keys.dtype]
    assert off(stored[0], rotate(keys, *wide)) < max(tolerance, rounding)
    assert off(stored[1], values) < max(1e-6, rounding)


_ROUNDING = {
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
    torch.float8_e4m3fn: 0.05,
    torch.int8: 0.02,
}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_attend_as_float32_does(device, name, step, dtype):
    for number, sizes in enumerate(heads_of(device)):
        if name != "flashinfer" or sizes[2] in FLASHINFER_DIMS:
            check(name, paged(requests(step, device), sizes, device, dtype, seed=number), TOLERANCES[dtype])


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_cache_of_eight_bits_is_read_as_it_was_written(device, name, step, cache_dtype):
    made = paged(requests(step, device), heads_of(device)[0], device, torch.bfloat16, stored=cache_dtype)
    check(name, made, 2 * TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("name", BACKENDS)
def test_an_answer_does_not_depend_on_batch_mates(device, name):
    """But for rounding: each request alone, and all together."""
    dtype = torch.float16 if name == "flashinfer" else torch.float32
    together = paged(requests("mixed", device), heads_of(device)[0], device, dtype)
    backend, rotary, bounds = chosen(name, together), turns(together), together.starts.tolist()
    whole = run(together, backend, rotary)
    for number in (0, len(bounds) - 3, len(bounds) - 2):
        mine = slice(bounds[number], bounds[number + 1])
        alone = run(together.alone(number), backend, tuple(part[mine] for part in rotary))
        assert off(alone, whole[mine]) < TOLERANCES[dtype] / 3


def test_neither_batch_mates_nor_chunks_nor_programs_change_a_bit(cuda, monkeypatch):
    """Run on a GPU what tests of the kernels run under the interpreter, whose sums are made to have one order."""
    from tests.vlmserve_common.kernels import test_triton_decode, test_triton_extend

    test_triton_extend.test_neither_batch_mates_nor_chunks_change_a_bit()
    monkeypatch.setattr(test_triton_decode.decode, "SHORTEST_SPLIT", 32)
    test_triton_decode.test_neither_batch_mates_nor_the_number_of_programs_change_a_bit(monkeypatch)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("dim", [64, 72, 80])
def test_segments_of_towers(device, dim, dtype):
    """Whole pictures of one size, of several, windows, and windows cut at the edge."""
    random = torch.Generator(device).manual_seed(dim)
    full = device.type == "cuda"
    heads = 16 if full else 2
    pictures = [[4096] * 4, [1024, 256, 4096, 16], [64] * 60, [64, 64, 48, 16, 12, 64]] if full else [[16, 16], [4, 12]]
    for lengths in pictures:
        count = sum(lengths)
        qkv = torch.randn((count, 3, heads, dim), generator=random, device=device).to(dtype)
        rotary = rotation(torch.randn((count, dim // 2), generator=random, device=device), torch.float32)
        with torch.inference_mode():
            found = finish(segment_attention(qkv.clone(), rotary, Segments(lengths, device), UNLIMITED))
        assert off(found, attended(qkv, rotary, lengths)) < TOLERANCES[dtype], lengths


def attended(qkv: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """In float32."""
    cos, sin = rotary
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    turned = qkv[:, :2].float() * cos[:, None] + torch.cat((second, first), -1) * sin[:, None]
    parts = zip(turned[:, 0].split(lengths), turned[:, 1].split(lengths), qkv[:, 2].float().split(lengths), strict=True)
    made = []
    for q, k, v in parts:
        weights = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        made.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(made)
