"""A plan as Markdown tables, and as data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmserve.commands.plan.fitting import Fit
from vlmserve.commands.plan.layout import Layout
from vlmserve.commands.plan.plan import PICTURE, Plan
from vlmserve.commands.plan.times import Floor
from vlmserve_common.compute.tensors import dtype_name

_GIB = 1024**3


def show(plan: Plan) -> str:
    """Memory, then times."""
    asked, gpu, parts = plan.asked, plan.gpu, [*_about(plan), ""]
    parts += [_memory(plan), "", _room(plan), "", f"At the least, with {asked.context} tokens of context:", ""]
    parts += [_times(plan), "", f"A picture of {PICTURE}x{PICTURE} in the tower: {plan.picture * 1e3:.3g} ms."]
    link = f"{gpu.link / 1e9:g} GB/s to others" if gpu.link else "exchanges between GPUs not counted"
    rates = f"{gpu.bandwidth / 1e9:g} GB/s, {gpu.flops / 1e12:g} TFLOP/s in 16 bits, {gpu.fp8_flops / 1e12:g} in 8"
    parts += [f"By the data sheet: {rates}, {link}.", "No exchange is hidden behind computing."]
    parts += [f"Note: {note}." for note in plan.notes]
    return "\n".join(parts)


def as_data(plan: Plan) -> dict[str, Any]:
    """Bytes, seconds, tokens."""
    model, layout = plan.model, plan.layout
    return {
        "model": {
            "family": model.config.family,
            "parameters": model.parameters,
            "active_parameters": model.active,
            "dtype": dtype_name(model.outline.dtype),
            "kv_cache_dtype": dtype_name(model.kv_dtype),
        },
        "layout": {
            "gpus": layout.gpus,
            "tp": layout.tp,
            "pp": layout.pp,
            "dp": layout.dp,
            "ep": layout.ep,
            "dp_attention": layout.dp_attention,
        },
        "gpu": {
            "name": plan.gpu.name,
            "memory": plan.gpu.memory,
            "bandwidth": plan.gpu.bandwidth,
            "flops": plan.gpu.flops,
            "fp8_flops": plan.gpu.fp8_flops,
            "link": plan.gpu.link,
        },
        "stages": [
            {
                "layers": [one.stage.first, one.stage.last - 1],
                "embedding": one.stage.embedding,
                "layers_without_experts": one.stage.dense,
                "experts": one.stage.experts,
                "head": one.stage.head,
                "tower": one.stage.tower,
                "weights": one.stage.weights,
                "reserved": one.reserved,
                "states": one.states,
                "computing": one.activations.peak - one.activations.graphs,
                "graphs": one.activations.graphs,
                "kv_cache": int(one.kv),
                "kv_bytes_per_token": one.stage.kv,
            }
            for one in plan.fits.stages
        ],
        "kv_tokens": plan.fits.tokens,
        "decode": {str(batch): None if floor is None else _floor(floor) for batch, floor in plan.decode.items()},
        "prefill": {"tokens": plan.asked.prompt, **_floor(plan.prefill)},
        "context": plan.asked.context,
        "picture_seconds": plan.picture,
        "notes": list(plan.notes),
    }


def _about(plan: Plan) -> list[str]:
    model, gpu = plan.model, plan.gpu
    scheme = "" if model.scheme is None else f", layers as {type(model.scheme).__name__.removesuffix('Scheme')}"
    return [
        f"{model.config.family}: {model.config.num_layers} layers, {model.parameters / 1e9:.2f}e9 parameters, of which "
        f"a token goes through {model.active / 1e9:.2f}e9; {dtype_name(model.outline.dtype)}, KV cache "
        f"{dtype_name(model.kv_dtype)}{scheme}",
        f"{plan.layout.gpus} x {gpu.name} with {gpu.memory / _GIB:.4g} GiB: {_layout(plan.layout)}",
    ]


def _layout(layout: Layout) -> str:
    words = f"--tp {layout.tp} --pp {layout.pp} --dp {layout.dp} --ep {layout.ep}"
    return words + " --enable-dp-attention" * layout.dp_attention


def _memory(plan: Plan) -> str:
    stages = plan.fits.stages
    names = [f"layers {one.stage.first} to {one.stage.last - 1}" for one in stages]
    rows = [["GiB of the fullest GPU", *names]]
    for name, values in (
        ("embedding", [one.stage.embedding for one in stages]),
        ("layers without experts", [one.stage.dense for one in stages]),
        ("experts", [one.stage.experts for one in stages]),
        ("head", [one.stage.head for one in stages]),
        ("vision tower", [one.stage.tower for one in stages]),
        ("= weights", [one.stage.weights for one in stages]),
        ("computing: a prompt's chunk", [one.activations.step for one in stages]),
        ("computing: logits", [one.activations.logits for one in stages]),
        ("computing: pictures in the tower", [one.activations.tower for one in stages]),
        ("recurrent states", [one.states for one in stages]),
        ("CUDA graphs, at the most", [one.activations.graphs for one in stages]),
        ("CUDA and its libraries (assumed)", [one.reserved for one in stages]),
        ("KV cache", [one.kv for one in stages]),
        ("not used (--mem-fraction-static)", [_unused(plan, one) for one in stages]),
    ):
        if any(values):
            rows.append([name, *(f"{value / _GIB:.2f}" for value in values)])
    return _markdown(rows)


def _unused(plan: Plan, one: Fit) -> float:
    taken = one.stage.weights + one.activations.peak + one.states + one.reserved + one.kv
    return plan.gpu.memory - taken


def _room(plan: Plan) -> str:
    layout, context, tokens = plan.layout, plan.asked.context, plan.fits.tokens
    whose = "a group of ranks" if layout.dp_attention else "a replica" if layout.replicas > 1 else "the KV cache"
    copies = layout.replicas * layout.groups
    every = f"; {copies * tokens} in all" if copies > 1 else ""
    bytes_each = " and ".join(dict.fromkeys(f"{one.stage.kv / 1024:g} KiB" for one in plan.fits.stages))
    return (
        f"Room for {tokens} tokens in {whose}{every}: {tokens // context} requests of {context}. "
        f"A token takes {bytes_each} on a GPU."
    )


def _times(plan: Plan) -> str:
    rows = [["", "ms", "of these exchanges", "GB read by a GPU", "tokens/s of a request", "tokens/s of all"]]
    for batch, floor in plan.decode.items():
        name = f"decode step of {batch}"
        if floor is None:
            rows.append([name, "no room for their contexts", "", "", "", ""])
        else:
            rows.append([name, *_cells(floor), f"{1 / floor.seconds:.0f}", f"{floor.rate:.0f}"])
    rows.append([f"prompt of {plan.asked.prompt}", *_cells(plan.prefill), "", f"{plan.prefill.rate:.0f}"])
    return _markdown(rows)


def _cells(floor: Floor) -> list[str]:
    return [f"{floor.seconds * 1e3:.3g}", f"{floor.exchange * 1e3:.3g}", f"{floor.read / 1e9:.3g}"]


def _floor(floor: Floor) -> dict[str, float]:
    return {
        "seconds": floor.seconds,
        "slowest_stage_seconds": floor.slowest,
        "exchange_seconds": floor.exchange,
        "bytes_read": floor.read,
        "tokens_per_second": floor.rate,
    }


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
