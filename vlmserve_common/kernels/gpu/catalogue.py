"""Every kernel in the variants that users meet, and the resources they need when compiled for a GPU, also without one.

The variants are those launched for tensors in the shapes of published models. These tensors have no memory, and
launches are only noted.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import KernelInterface

from vlmserve_common.compute.delta_rule import ChunkTable, KeptGuesses
from vlmserve_common.compute.expert_part import part_of_experts
from vlmserve_common.compute.fp8 import FP8, GROUP, Blocks, ExpertScales
from vlmserve_common.compute.int_weights import IntForm, IntWeights
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.kernels.attention import CacheLayer, HeadNorms
from vlmserve_common.kernels.delta_step import DeltaWeights
from vlmserve_common.kernels.gpu import (
    decode,
    delta_conv,
    delta_rule,
    extend,
    fp8,
    int_linear,
    lora,
    positions,
    sampling,
    segments,
)
from vlmserve_common.kernels.gpu.activation import silu_mul
from vlmserve_common.kernels.gpu.experts import run_experts
from vlmserve_common.kernels.gpu.norm import add_rms_norm, gated_rms_norm, rms_norm
from vlmserve_common.kernels.gpu.page_table import page_indices

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_BF16, _HALF, _FULL, _INT8, _INT, _LONG = (
    torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32, torch.int64,
)  # fmt: skip
_TYPES = {_FULL: "fp32", _BF16: "bf16", _HALF: "fp16", FP8: "fp8e4nv", _INT8: "i8", _INT: "i32", _LONG: "i64"}
_TYPES |= {torch.uint8: "u8", torch.int16: "i16"}  # of numbers and zeros
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_CACHES = ((_BF16, _BF16), (_BF16, FP8), (_BF16, _INT8), (_HALF, _HALF), (_FULL, _FULL))
"""The dtypes of queries and of the cache."""
_HEADS = ((128, 4), (128, 7), (64, 1), (72, 2), (80, 8), (96, 5), (256, 2))
"""Elements, and query heads of a KV head."""
_CONTEXT = 8191
_HIDDEN, _INTERMEDIATE = 4096, 12288


@dataclass(frozen=True, kw_only=True)
class Variant:
    """name: unique, for people. kernel: a function under `triton.jit`. options: of its launch.

    signature: Triton's types of the arguments at run time, in order; "*bf16:16" and "i32:16" are a pointer and a number
    that are known to be multiples of 16, as those of tensors are that are launched. constexprs: the other arguments.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    options: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a compiled variant: registers and bytes of spilled local memory of a thread, bytes of shared memory
    of a block. tensor_cores: the widest instruction it multiplies by: "wgmma", "mma" or "". async_copies:
    whether it has loads that a pipeline overlaps with work."""

    name: str
    registers: int
    spilled: int
    shared: int
    tensor_cores: str
    async_copies: bool


def catalogue() -> tuple[Variant, ...]:
    """All variants of all kernels."""
    found: dict[str, Variant] = {}
    what = ""

    def note_launches(kernel: Any, grid: object) -> Callable[..., None]:
        def note(*args: Any, **kwargs: Any) -> None:
            name = f"{kernel.fn.__name__.strip('_').removesuffix('_kernel')}: {what}"
            if name in found:  # a sparse MLP's second product
                name += ", again"
            variant = _variant(name, kernel, args, kwargs)
            if not any(replace(one, name=name) == variant for one in found.values()):
                found[name] = variant

        return note

    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = note_launches
    try:
        for what in _launches():  # noqa: B007  `note` reads it
            pass
    finally:
        KernelInterface.__getitem__ = launch
    return tuple(found.values())


def _variant(name: str, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Variant:
    """Describe a launch as Triton specialises it."""
    parameters = inspect.signature(kernel.fn).parameters
    plain = kernel.do_not_specialize if hasattr(kernel, "do_not_specialize") else kernel.kwargs["do_not_specialize"]
    given = dict(zip(parameters, args, strict=False)) | {key: kwargs[key] for key in kwargs if key in parameters}
    signature: dict[str, str] = {}
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            signature[key] = f"*{_TYPES[value.dtype]}:16"
        elif "constexpr" not in str(parameters[key].annotation) and value is not None:
            specialised = isinstance(value, int) and key not in (plain or ())
            if not (specialised and value == 1):
                kind = "fp32" if isinstance(value, float) else "i32"
                signature[key] = f"{kind}:16" if specialised and value % 16 == 0 else kind
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs={key: value for key, value in given.items() if key not in signature},
        options={key: kwargs[key] for key in _OPTIONS if key in kwargs},
    )


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launches() -> Iterator[str]:
    """Launch all kernels. Yields what the launches that follow are of."""
    for (dtype, stored), (dim, group) in product(_CACHES, _HEADS):
        if dtype == stored == _BF16 or (dim, group) in ((128, 4), (256, 2)):
            yield f"{dtype_name(dtype)}, cache {dtype_name(stored)}, dim {dim}, group {group}"
            _attend(dtype, stored, dim, group)
    yield "some requests"
    _attend(_BF16, _BF16, 128, 4, chosen=True)
    for dim in (72, 256):
        yield f"a long history, dim {dim}"
        _attend(_BF16, _BF16, dim, 2, context=5 * _CONTEXT)
    yield from _vision()
    yield from _between_products()
    yield from _delta_nets()
    yield from _products()


def _attend(
    dtype: torch.dtype, stored: torch.dtype, dim: int, group: int, *, chosen: bool = False, context: int = _CONTEXT
) -> None:
    kv_heads, batch = 4, 2
    heads = kv_heads * group
    q = _empty(batch, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    numbers = _empty(batch + 1, dtype=_INT)
    rows = (_empty(batch + 1, context, dtype=_INT), _empty(batch, dtype=_LONG), numbers[:batch])
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "dim": dim, "context": context}
    workspace = decode.SplitWorkspace.make(**sizes, device=q.device)
    some = {"requests": numbers[:batch], "starts": numbers} if chosen else {}
    cache, out = _cache(stored, kv_heads, dim), torch.empty_like(q)
    decode.decode_attention(q, cache, *rows, scale=1.0, out=out, workspace=workspace, **some)
    extend.extend_attention(q, cache, *rows, numbers, _empty(3, 2, dtype=_INT), scale=1.0, out=out)


def _cache(stored: torch.dtype, kv_heads: int, dim: int) -> CacheLayer:
    keys, scales = _empty(64, kv_heads, dim, dtype=stored), _empty(64, kv_heads, dtype=_FULL)
    if stored == _INT8:
        return CacheLayer(keys=keys, values=keys, key_scales=scales, value_scales=scales)
    return CacheLayer(keys=keys, values=keys)


def _vision() -> Iterator[str]:
    heads = ((_BF16, 64), (_BF16, 72), (_BF16, 80), (_BF16, 128), (_HALF, 72), (_HALF, 80), (_FULL, 72), (_FULL, 80))
    for dtype, dim in heads:
        qkv, angles = _empty(100, 3, 16, dim, dtype=dtype), _empty(100, 1, dim, dtype=_FULL)
        yield f"{dtype_name(dtype)}, dim {dim}"
        segments.turn(qkv, angles, angles)
        for rows in sorted({segments.tile_rows(dtype, longest) for longest in (64, 65)}):
            yield f"{dtype_name(dtype)}, dim {dim}, tiles of {rows}"
            segments.segment_attention(qkv, _empty(3, 3, dtype=_INT), rows)


def _between_products() -> Iterator[str]:
    for dtype, size in ((_BF16, 2048), (_BF16, 8192), (_FULL, 8192)):
        x = _empty(3, size, dtype=dtype)
        yield f"{dtype_name(dtype)}, {size}"
        silu_mul(x)
        rms_norm(x, x[0], 1e-6)
        yield f"{dtype_name(dtype)}, {size}, behind a sum"
        add_rms_norm(x, x, x[0], 1e-6)
    for dtype, stored, dim in (*((*dtypes, 128) for dtypes in _CACHES), (_BF16, _BF16, 80)):
        qkv, turns, weight = _empty(3, 32, dim, dtype=dtype), _empty(3, 1, dim, dtype=dtype), _empty(dim, dtype=dtype)
        norms = None if dim == 80 else HeadNorms(q_weight=weight, k_weight=weight, eps=1e-6)
        yield f"{dtype_name(dtype)}, cache {dtype_name(stored)}, dim {dim}{'' if norms is None else ', normalised'}"
        positions.position_and_store(qkv, (turns, turns), norms, _empty(3, dtype=_LONG), _cache(stored, 8, dim))
    yield "pages of 16"
    numbers = _empty(4, dtype=_INT)
    page_indices(_empty(4, 4095, dtype=_INT), _empty(3, dtype=_LONG), numbers, numbers, page_size=16, most=3)
    scores, ids = _empty(2, 150_001, dtype=_FULL), _empty(2, 150_001, dtype=_LONG)
    for name, some in (("all tokens", None), ("some tokens", ids)):
        yield name
        sampling.choose(scores, some, ids[:, 0], ids[:, 0])


def _delta_nets() -> Iterator[str]:
    """In the shapes of Qwen3.5: 16 key heads, and 2 or 4 value heads for each."""
    for dtype, heads in ((_BF16, 32), (_BF16, 64), (_HALF, 32), (_FULL, 32)):
        channels, dim, rows, layers = (32 + heads) * 128, 128, 3, 4
        one = _empty(heads, dtype=dtype)
        conv, norm = _empty(channels, 4, dtype=dtype), _empty(dim, dtype=dtype)
        weights = DeltaWeights(
            conv=conv,
            a_log=one,
            dt_bias=one,
            norm=norm,
            eps=1e-6,
            sigmoid_gate=False,
            key_heads=16,
            value_heads=heads,
            key_dim=dim,
            value_dim=dim,
        )
        mixed, gate = _empty(rows, channels + heads * dim, dtype=dtype).split([channels, heads * dim], dim=1)
        b, a = _empty(rows, 2 * heads, dtype=dtype).chunk(2, dim=1)
        states = _empty(9, layers, 3, channels, dtype=dtype)[:, 1]
        recurrent = _empty(9, layers, heads, dim, dim, dtype=_FULL)
        out = _empty(rows, heads, dim, dtype=dtype)
        x = mixed.new_empty(mixed.shape)
        net = delta_rule.NetStep(mixed=x, b=b, a=a, weights=weights, recurrent=recurrent[:, 1], out=out)
        table = ChunkTable(chunks=_empty(2, 5, dtype=_INT), starts=_empty(2, dtype=_INT))
        yield f"{dtype_name(dtype)}, {heads} heads"
        delta_conv.convolve_chunks(mixed, conv, states, table, x)
        delta_rule.run_chunks(net, table)
        gated_rms_norm(out, norm, gate.view_as(out), 1e-6, sigmoid=False)
        numbers, tokens = _empty(rows, dtype=_LONG), _empty(rows, 5, dtype=_LONG)
        for name, some in (("every token", None), ("some tokens", tokens[:, :1])):
            yield f"{dtype_name(dtype)}, {heads} heads, {name}"
            delta_conv.convolve_few(mixed, conv, states, numbers, some, x)
            delta_rule.run_few(net, numbers, some)
        yield f"{dtype_name(dtype)}, {heads} heads, guesses"
        keys = _empty(rows, layers, 5, heads, dim, dtype=_FULL)
        whole = KeptGuesses(keys=keys, corrections=keys, decay=keys[..., 0], rows=numbers)
        kept = KeptGuesses(keys=keys[:, 1], corrections=keys[:, 1], decay=keys[:, 1, ..., 0], rows=numbers)
        inputs = _empty(rows, layers, 8, channels, dtype=dtype)[:, 1]
        delta_conv.convolve_few(mixed, conv, states, numbers, tokens, x, (inputs, numbers))
        delta_rule.run_few(net, numbers, tokens, kept)
        delta_rule.advance(recurrent, whole, numbers, numbers, numbers)


def _products() -> Iterator[str]:
    for total, rows, dtype, biased in (
        *((total, rows, _BF16, False) for total in (1, 64, 8192) for rows in (GROUP, 1)),
        *((total, GROUP, _BF16, True) for total in (1, 8192)),
        *((1, GROUP, dtype, False) for dtype in (_HALF, _FULL)),
    ):
        bias = _empty(_INTERMEDIATE, dtype=dtype) if biased else None
        scales = _empty(_INTERMEDIATE // rows, _HIDDEN // GROUP, dtype=_FULL)
        yield f"{dtype_name(dtype)}, {total} rows, blocks of {rows} outputs{', bias' if biased else ''}"
        weight = _empty(_INTERMEDIATE, _HIDDEN, dtype=FP8)
        fp8.block_linear(_empty(total, _HIDDEN, dtype=dtype), weight, scales, bias, rows=rows)
    for size, scale in ((_HIDDEN, None), (_INTERMEDIATE, None), (_INTERMEDIATE, _empty(1, dtype=_FULL))):
        yield f"groups of {size}{'' if scale is None else ', scale given'}"
        fp8.quantize(_empty(2, size, dtype=_BF16), size, scale)
    for dtype, bits, total, group in (
        *((_BF16, bits, total, 128) for bits in (4, 8) for total in (1, 64, 8192)),
        *((_BF16, 4, total, 32) for total in (1, 8192)),
        *((dtype, 4, 1, 128) for dtype in (_HALF, _FULL)),
    ):
        yield f"{dtype_name(dtype)}, {total} rows, groups of {group}, {bits} bits"
        weights = _ints(1, _INTERMEDIATE, _HIDDEN, bits, group, dtype)
        int_linear.int_linear(_empty(total, _HIDDEN, dtype=dtype), weights, None)
    for dtype, bits, rows in (*((_BF16, 4, rows) for rows in (8, 4096, 16384)), (_BF16, 8, 16384), (_FULL, 4, 8)):
        yield f"{dtype_name(dtype)}, {rows} rows, {bits} bits"
        gate_up, down = (_ints(128, *sizes, bits, 128, dtype) for sizes in ((2 * 768, 2048), (2048, 768)))
        x, ids = _empty(rows // 8, 2048, dtype=dtype), _empty(rows // 8, 8, dtype=_INT)
        run_experts(x, ids, torch.empty_like(ids, dtype=dtype), gate_up, down, x)
    for dtype in (_BF16, _HALF, _FULL):
        yield f"{dtype_name(dtype)}, two adapters"
        a, b = _empty(48, _HIDDEN, dtype=dtype), _empty(16, _INTERMEDIATE, dtype=dtype)
        factors = lora.DeviceFactors(a=a, b=b, parts=_empty(_INTERMEDIATE, dtype=_INT))
        table = lora.FactorsTable.of([factors, None], a.device)
        lora.added(_empty(3, _HIDDEN, dtype=dtype), table, _empty(3, dtype=_INT))
    many = {_BF16: (8, 4096, 16384), _HALF: (16384,), _FULL: (8,)}
    for dtype, inputs_first, scaled in product(many, (True, False), (True, False)):
        for rows in many[dtype] if dtype == _BF16 or not scaled else ():
            yield f"{dtype_name(dtype)}, {rows} rows, inputs {'first' if inputs_first else 'last'}, {scaled=}"
            _run_experts(dtype, rows // 8, inputs_first=inputs_first, scaled=scaled)
    from vlmserve_common.kernels.gpu.routing import route

    for dtype, experts in product((_BF16, _FULL), (128, 512)):
        yield f"{dtype_name(dtype)}, {experts} experts"
        route(_empty(2, experts, dtype=dtype), 8)


def _ints(count: int, outer: int, inner: int, bits: int, group: int, dtype: torch.dtype) -> IntWeights:
    with torch.device("meta"):
        return IntWeights(IntForm(outer=outer, inner=inner, bits=bits, group=group, dtype=dtype), count)


def _run_experts(dtype: torch.dtype, tokens: int, *, inputs_first: bool, scaled: bool) -> None:
    """In the shapes of 30B-A3B and 235B-A22B."""
    experts, chosen, size, inner = 128, 8, 2048, 768
    kind = FP8 if scaled else dtype
    gate_up, down = _empty(experts, 2 * inner, size, dtype=kind), _empty(experts, size, inner, dtype=kind)
    if inputs_first:
        gate_up, down = gate_up.mT.contiguous().mT, down.mT.contiguous().mT
    with torch.device("meta"):
        blocks = Blocks(outputs=GROUP, inputs=GROUP)
        scales = ExpertScales(part_of_experts(experts, inner), size, (blocks, blocks)) if scaled else None
    x, ids = _empty(tokens, size, dtype=dtype), _empty(tokens, chosen, dtype=_INT)
    run_experts(x, ids, torch.empty_like(ids, dtype=dtype), gate_up, down, x, scales)


def compiled(variant: Variant, capability: int = 90) -> Resources:
    """Compile a variant; not under Triton's interpreter. Whatever the compiler raises."""
    signature, attributes = {}, {}
    for index, name in enumerate(variant.kernel.arg_names):
        kind, _, multiple = variant.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        if multiple:
            attributes[(index,)] = [["tt.divisibility", int(multiple)]]
    source = ASTSource(variant.kernel, signature, dict(variant.constexprs), attributes)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(variant.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = found.asm["ptx"]
    return Resources(
        name=variant.name,
        registers=numbers["REG"],
        spilled=numbers["STACK"] + numbers["LOCAL"],
        shared=found.metadata.shared,
        tensor_cores="wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "",
        async_copies="cp.async" in ptx,
    )


def main(names: Iterable[str]) -> None:
    """Print the resources of variants whose names begin so, one a line as JSON."""
    wanted = tuple(names) or ("",)
    for variant in catalogue():
        if variant.name.startswith(wanted):
            print(json.dumps(asdict(compiled(variant))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
