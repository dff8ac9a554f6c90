"""A plan: the question, and the memory and times that answer it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlmserve.commands.plan.fitting import Fits, fit
from vlmserve.commands.plan.gpus import Gpu
from vlmserve.commands.plan.layout import Layout, SpreadModel, lay_out
from vlmserve.commands.plan.times import Floor, Times
from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.checkpoint.fp8 import Fp8Scheme
from vlmserve_common.compute.tensors import dtype_setting
from vlmserve_common.errors import EngineError

PICTURE = 1024
"""The side of the picture whose time in the tower is told, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question. context: tokens of each request. batches: requests that decode together. prompt: tokens.

    reserved: bytes of each GPU for CUDA and its libraries.
    """

    args: EngineArgs
    context: int
    batches: tuple[int, ...]
    prompt: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An answer. decode: floors by requests, None if their contexts do not fit. picture: seconds in the tower."""

    model: SpreadModel
    layout: Layout
    gpu: Gpu
    asked: Asked
    fits: Fits
    decode: dict[int, Floor | None]
    prefill: Floor
    picture: float
    notes: tuple[str, ...]


def make_plan(folder: Path, layout: Layout, gpu: Gpu, asked: Asked) -> Plan:
    """Make the plan of a folder with config.json.

    Raises EngineError with numbers for what cannot be, and CheckpointError for a config.json that cannot be.
    """
    args = asked.args
    model = lay_out(folder, layout, dtype=dtype_setting(args.dtype), kv_cache_dtype=args.kv_cache_dtype)
    longest = args.max_model_len or model.config.max_position_embeddings
    if asked.context > longest:
        raise EngineError(f"--context is {asked.context}, and requests have {longest} tokens at the most")
    fits = fit(model, layout, gpu, args, context=asked.context, reserved=asked.reserved)
    times = Times(model, layout, gpu)
    decode: dict[int, Floor | None] = {}
    for batch in asked.batches:
        there = -(-batch // layout.groups) * asked.context <= fits.tokens
        decode[batch] = times.decode(batch, asked.context) if there else None
    return Plan(
        model=model,
        layout=layout,
        gpu=gpu,
        asked=asked,
        fits=fits,
        decode=decode,
        prefill=times.prefill(asked.prompt),
        picture=times.picture(PICTURE),
        notes=tuple(_notes(model, layout)),
    )


def _notes(model: SpreadModel, layout: Layout) -> Iterator[str]:
    experts, scheme, heads = model.config.experts, model.scheme, model.config.num_kv_heads
    if layout.attention_tp > heads:
        yield f"{heads} KV heads on {layout.attention_tp} ranks: each is held {layout.attention_tp // heads} times"
    if experts is not None:
        yield "experts that are hit: as many as if chance chose them, evenly over the GPUs"
    if experts is not None and isinstance(scheme, Fp8Scheme) and scheme.block:
        part = experts.intermediate_size * layout.ep // layout.tp
        if part % scheme.block[0]:
            yield (
                f"{part} of an expert's {experts.intermediate_size} inner elements on each GPU are no multiple of the "
                f"{scheme.block[0]} that share a scale: take a larger --ep"
            )
