"""A plan as Markdown tables, and as data for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vlmserve.commands.plan.gpus import Gpu
from vlmserve.commands.plan.plan import PICTURE, Fit, Floor, HandOver, Plan
from vlmserve_common.compute.memory import show_gib
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError

_GIB = 1024**3


def show(plan: Plan) -> str:
    """Return the tables of memory and times."""
    gpu, parts = plan.gpu, [*_about(plan), ""]
    parts += [_memory(plan), "", _room(plan), "", f"At the least, with {plan.context} tokens of context:", ""]
    cached = f"the cache of embeddings (--encoder-cache-mib) holds {plan.pictures} of them"
    parts += [_times(plan), ""]
    if plan.picture:  # of a model that sees
        parts += [f"A picture of {PICTURE}x{PICTURE} in the tower: {plan.picture * 1e3:.3g} ms; {cached}."]
    link = f"{gpu.link / 1e9:g} GB/s to others" if gpu.link else "exchanges between GPUs not counted"
    rates = f"{gpu.bandwidth / 1e9:g} GB/s, {gpu.flops / 1e12:g} TFLOP/s in 16 bits, {gpu.fp8_flops / 1e12:g} in 8"
    parts += [f"By the data sheet: {rates}, {link}.", "No exchange is hidden behind computing."]
    parts += [*_hand_over(plan), *(f"Note: {note}." for note in plan.notes)]
    return "\n".join(parts)


def _hand_over(plan: Plan) -> list[str]:
    one = plan.hand_over
    if one is None:
        return []
    link, kv, picture = f"{one.link / 1.25e8:g} Gbit/s", show_gib(one.kv), show_gib(one.picture)
    return [
        f"A prefill and a decode server (--role), each as above: the KV of {plan.context} tokens is {kv},",
        f"{one.kv_seconds * 1e3:.3g} ms over {link}; prompts at full speed fill {one.most / 1.25e8:.3g} Gbit/s.",
        f"An encode server: embeddings of that picture are {picture}, {one.picture_seconds * 1e3:.3g} ms; the first "
        f"GPU of the others has {show_gib(one.tower)} more.",
    ]


def overview(gpu: Gpu, plans: Mapping[str, Plan | EngineError]) -> str:
    """Return a table with a line for each model on one device."""
    how = "measured here" if gpu.is_cpu else "by the data sheet"
    picture = f"seconds of a picture of {PICTURE}x{PICTURE}"
    rows = [["", "GiB of weights", "tokens/s of one answer", "tokens/s of a prompt", picture]]
    for name, plan in plans.items():
        if isinstance(plan, EngineError):
            rows.append([name, str(plan).partition(":")[0], "", "", ""])
            continue
        weights, single = sum(stage.stage.weights for stage in plan.stages) / _GIB, plan.decode[1]
        figures = [weights, 1 / single.seconds if single else 0.0, plan.prefill.tokens_per_second, plan.picture]
        rows.append([name, *(f"{one:.0f}" if one >= 100 else f"{one:.3g}" for one in figures)])
    return "\n".join(
        [
            f"{gpu.name}: {gpu.memory / _GIB:.4g} GiB{' free' * gpu.is_cpu}; {gpu.bandwidth / 1e9:.3g} GB/s and "
            f"{gpu.flops / 1e12:.3g} TFLOP/s, {how}.",
            "",
            _markdown(rows),
            "",
            "These are upper bounds: expect somewhat less. The speed of an answer is that behind --context tokens.",
        ]
    )


def as_data(plan: Plan | EngineError) -> dict[str, Any]:
    """Return the plan for JSON, in bytes, seconds and tokens, or the reason why there is none."""
    if isinstance(plan, EngineError):
        return {"error": str(plan)}
    model = plan.model
    return {
        "model": {
            "family": model.config.family,
            "parameters": model.parameters,
            "active_parameters": model.active,
            "dtype": dtype_name(model.outline.dtype),
            "kv_cache_dtype": dtype_name(model.kv_dtype),
        },
        "layout": {"gpus": _gpus(plan), **_sizes(plan), "dp_attention": plan.args.enable_dp_attention},
        "gpu": asdict(plan.gpu),
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
                "computing": one.activations.peak - one.activations.graphs - one.activations.embeds,
                "graphs": one.activations.graphs,
                "embeddings": one.activations.embeds,
                "kv_cache": int(one.kv),
                "kv_bytes_per_token": one.stage.kv,
            }
            for one in plan.stages
        ],
        "kv_tokens": plan.tokens,
        "window_tokens": min([plan.tokens, *(fit.stage.windows.tokens for fit in plan.stages if fit.stage.windows)]),
        "decode": {str(batch): floor and asdict(floor) for batch, floor in plan.decode.items()},
        "prefill": {"tokens": plan.prompt, **asdict(plan.prefill)},
        "context": plan.context,
        "picture_seconds": plan.picture,
        "pictures_cached": plan.pictures,
        "hand_over": None if plan.hand_over is None else _hand_over_data(plan.hand_over),
        "notes": list(plan.notes),
    }


def _hand_over_data(one: HandOver) -> dict[str, float]:
    return asdict(one) | {"kv_seconds": one.kv_seconds, "picture_seconds": one.picture_seconds}


def _about(plan: Plan) -> list[str]:
    model, gpu = plan.model, plan.gpu
    scheme = "" if model.scheme is None else f", layers as {type(model.scheme).__name__.removesuffix('Scheme')}"
    words = " ".join(f"--{name} {size}" for name, size in _sizes(plan).items())
    words += " --enable-dp-attention" * plan.args.enable_dp_attention
    return [
        f"{model.config.family}: {model.config.num_layers} layers, {_short(model.parameters / 1e9)}e9 parameters, of "
        f"which a token goes through {_short(model.active / 1e9)}e9; {dtype_name(model.outline.dtype)}, KV cache "
        f"{dtype_name(model.kv_dtype)}{scheme}",
        f"{_gpus(plan)} x {gpu.name} with {gpu.memory / _GIB:.4g} GiB: {words}",
    ]


def _sizes(plan: Plan) -> dict[str, int]:
    return {name: getattr(plan.args, f"{name}_size") for name in ("tp", "pp", "dp", "ep")}


def _gpus(plan: Plan) -> int:
    return plan.args.world_size * plan.args.num_replicas


def _memory(plan: Plan) -> str:
    stages = plan.stages
    names = [f"layers {one.stage.first} to {one.stage.last - 1}" for one in stages]
    rows = [["GiB of the fullest GPU", *names]]
    columns = [_column(plan, one) for one in stages]
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(values):
            rows.append([name, *(_short(value / _GIB) for value in values)])
    return _markdown(rows)


def _column(plan: Plan, fit: Fit) -> dict[str, float]:
    """Return the bytes of a stage's fullest GPU by their purpose."""
    stage, computing = fit.stage, fit.activations
    return {
        "embedding": stage.embedding,
        "layers without experts": stage.dense,
        "experts": stage.experts,
        "head": stage.head,
        "vision tower": stage.tower,
        "= weights": stage.weights,
        "computing: a prompt's chunk": computing.step,
        "computing: logits": computing.logits,
        "computing: pictures in the tower": computing.tower,
        "embeddings of pictures": computing.embeds,
        "recurrent states": fit.states,
        "CUDA graphs, at the most": computing.graphs,
        "CUDA and its libraries (assumed)": fit.reserved,
        "KV cache": fit.kv,
        "not used (--mem-fraction-static)": plan.gpu.memory
        - (stage.weights + computing.peak + fit.states + fit.reserved + fit.kv),
    }


def _room(plan: Plan) -> str:
    args, context, tokens = plan.args, plan.context, plan.tokens
    whose = "a group of ranks" if args.enable_dp_attention else "a replica" if args.dp_size > 1 else "the KV cache"
    copies = args.num_replicas * args.attention_groups
    every = f"; {copies * tokens} in all" if copies > 1 else ""
    bytes_each = " and ".join(dict.fromkeys(f"{one.stage.kv / 1024:g} KiB" for one in plan.stages))
    return (
        f"Room for {tokens} tokens in {whose}{every}: {tokens // context} requests of {context}. "
        f"A token takes {bytes_each} on a GPU." + _windows(plan)
    )


def _windows(plan: Plan) -> str:
    rooms = (fit.stage.windows for fit in plan.stages)
    own = {room for room in rooms if room is not None and room.bytes_per_token}  # a stage may have no such layer
    if not own or next(iter(own)).tokens >= plan.tokens:
        return ""
    bytes_each = " and ".join(f"{one / 1024:g} KiB" for one in sorted({room.bytes_per_token for room in own}))
    return f" Layers with windows, {bytes_each} of it, keep {next(iter(own)).tokens} tokens of all requests."


def _times(plan: Plan) -> str:
    rows = [["", "ms", "of these exchanges", "GB read by a GPU", "tokens/s of a request", "tokens/s of all"]]
    for batch, floor in plan.decode.items():
        name = f"decode step of {batch}"
        if floor is None:
            rows.append([name, "no room for their contexts", "", "", "", ""])
        else:
            rows.append([name, *_cells(floor), f"{1 / floor.seconds:.0f}", f"{floor.tokens_per_second:.0f}"])
    rows.append([f"prompt of {plan.prompt}", *_cells(plan.prefill), "", f"{plan.prefill.tokens_per_second:.0f}"])
    return _markdown(rows)


def _cells(floor: Floor) -> list[str]:
    return [f"{floor.seconds * 1e3:.3g}", f"{floor.exchange_seconds * 1e3:.3g}", f"{floor.bytes_read / 1e9:.3g}"]


def _short(figure: float) -> str:
    """Return a figure with two digits behind the point, or with two that are not zero."""
    return f"{figure:.2f}" if abs(figure) >= 0.1 or not figure else f"{figure:.2g}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
