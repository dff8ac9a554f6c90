"""The figures of `vlmserve bench gpu`, part by part: ours beside what the device can, and beside transformers."""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from processors.families.base import data_item
from processors.families.registry import make_processor
from processors.image.decoding import decode_image
from vision.towers.runner import TowerRunner, pixel_values
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve.commands.bench.checkpoints import published_tensors, save_weights
from vlmserve.commands.bench.figures import Spread
from vlmserve.commands.bench.gpu.delta_nets import DeltaNet
from vlmserve.commands.bench.gpu.run import GpuRun
from vlmserve.commands.bench.media import Question, jpeg, make_questions
from vlmserve.commands.bench.processes import run_python
from vlmserve.commands.bench.reference import ReferenceTower, check_logits, check_rows
from vlmserve.commands.bench.vision import grid_thw
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.floors import decode_bytes, prefill_flops, tower_flops
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.tensors import dtype_name

T = TypeVar("T")

_MIB = 2**20
_QUESTION = "What is shown? Answer in a few words."  # as long for each, so that transformers needs no padding
_THEIR_STEPS = 8
_START = """
import sys
from vlmserve import LLM
model, device, dtype = sys.argv[1:]
with LLM(model, device=device, dtype=dtype, max_total_tokens=16384, max_model_len=4096, max_running_requests=16) as llm:
    print(llm.info)
"""
_START_TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFigure:
    """A figure that was measured, or an error that says why not. key: its name in bars and JSON.

    `ours` and `theirs` are our spread and transformers', in `unit`. `value` is the number that a bar limits; `of` says
    of which kind it is ("x the floor", "of the GEMM rate" ...). `about` has more to know.
    """

    key: str
    name: str
    unit: str = ""
    ours: Spread | None = None
    theirs: Spread | None = None
    value: float | None = None
    of: str = ""
    about: str = ""
    error: str = ""


def ceilings(run: GpuRun) -> Iterator[GpuFigure]:
    """What the device reaches, with which all else is compared."""
    found, load = run.ceilings, run.load
    about = f"{load.copy_bytes / _MIB:.0f} MiB, bytes read and written"
    yield GpuFigure(key="copy", name="copying", unit="GB/s", ours=_one(found.bandwidth / 1e9), about=about)
    about = f"{found.rows} x {found.rows} x {found.rows}, the best of {', '.join(map(str, load.gemms))}"
    yield GpuFigure(key="gemm", name="matrix product", unit="TFLOP/s", ours=_one(found.flops / 1e12), about=about)


def agreement(run: GpuRun) -> Iterator[GpuFigure]:
    """The distance of both sides' logits. Raises AssertionError if they do not do the same work."""
    questions = make_questions(1, side=run.load.many_side, seed=1000)
    ours, theirs = run.engine.first_logits(questions[0]), run.theirs.logits(run.theirs.prepare(questions))
    off = check_logits(ours, theirs, run.dtype)
    name, about = "logits, distance to transformers'", "a part of their length"
    yield GpuFigure(key="logits", name=name, ours=_one(off), about=about)


def decode(run: GpuRun) -> Iterator[GpuFigure]:
    """The decode steps of each batch, beside the least time that reading their bytes takes."""
    for batch in run.load.batches:
        key, name = f"decode-{batch}", f"decode step of {batch}"
        try:
            steps = run.decoded(batch)
        except Exception as error:  # there is no room for this batch; smaller ones are measured all the same
            yield GpuFigure(key=key, name=name, error=_words(error))
            continue
        floor = decode_bytes(run.outline, steps.kv_tokens, requests=batch) / run.ceilings.bandwidth
        theirs, why = None, ""
        if batch < max(run.load.batches):
            theirs, why = _try_theirs(run, functools.partial(_their_step, run, batch))
        about = f"floor {floor * 1e3:.3g} ms; {run.load.context} tokens of context; {len(steps.seconds)} steps"
        yield GpuFigure(
            key=key,
            name=name,
            unit="ms",
            ours=Spread.of(steps.seconds, 1e3),
            theirs=theirs,
            value=steps.median / floor,
            of="x the floor",
            about=about + why,
        )


def _their_step(run: GpuRun, batch: int) -> Spread:
    prompts = run.engine.prompts(batch, run.load.context)

    def seconds(tokens: int) -> float:
        return min(run.seconds(lambda _: run.theirs.answer(prompts, tokens), rounds=1))

    short = seconds(1)
    return _one((seconds(1 + _THEIR_STEPS) - short) / _THEIR_STEPS * 1e3)


def prefill(run: GpuRun) -> Iterator[GpuFigure]:
    """A long prompt with an answer of one token."""
    tokens = run.load.prompt
    prompts = [run.engine.prompts(1, tokens, seed=number) for number in range(run.rounds + 1)]
    ours = run.seconds(lambda number: run.engine.answer(prompts[number], 1))
    theirs, why = _try_theirs(run, lambda: run.seconds(lambda number: run.theirs.answer(prompts[number], 1)))
    reached = prefill_flops(run.outline, tokens) / statistics.median(ours)
    yield GpuFigure(
        key="prefill",
        name=f"prefill of {tokens} tokens",
        unit="tokens/s",
        ours=_rates(tokens, ours),
        theirs=_rates(tokens, theirs) if theirs else None,
        value=reached / run.ceilings.flops,
        of="of the GEMM rate",
        about=f"{reached / 1e12:.4g} TFLOP/s{why}",
    )


def tower(run: GpuRun) -> Iterator[GpuFigure]:
    """Pictures to embeddings in one batch, whose rows are compared first."""
    load, visual = run.load, run.engine.model.visual
    pictures = _pictures(run.folder, load.pictures, load.side)
    patches = [patch for picture in pictures for patch in picture]
    grids = [grid_thw(picture) for picture in pictures]
    values = pixel_values(patches, run.device)
    reference = ReferenceTower(run.theirs.model, device=run.device, dtype=run.dtype)

    @torch.inference_mode()
    def encode(_: int) -> torch.Tensor:
        return visual(values, grids)

    off = check_rows(encode(0), reference.encode(values, grids))
    ours = run.seconds(encode)
    theirs = run.seconds(lambda _: reference.encode(values.to(run.dtype), grids))
    reached = tower_flops(run.outline.visual, len(pictures), patches[0].num_patches) / statistics.median(ours)
    yield GpuFigure(
        key="tower",
        name=f"tower, {len(pictures)} pictures of {load.side}x{load.side}",
        unit="patches/s",
        ours=_rates(len(values), ours),
        theirs=_rates(len(values), theirs),
        value=reached / run.ceilings.flops,
        of="of the GEMM rate",
        about=f"{reached / 1e12:.4g} TFLOP/s; embeddings are within {off:.2g} of each other",
    )
    runner = TowerRunner(visual, run.device)
    rate = _rates(len(values), run.seconds(lambda _: runner.encode(patches)))
    about = "pixels in the host's memory first"
    yield GpuFigure(key="encode", name="the same, uploaded", unit="patches/s", ours=rate, about=about)


def first_token(run: GpuRun) -> Iterator[GpuFigure]:
    """The first token about a new picture file; our processor serves both sides."""
    side = run.load.side
    questions = [[one] for one in make_questions(run.rounds + 1, side=side, seed=0)]
    ours = run.seconds(lambda number: run.engine.ask(questions[number], 1))
    theirs, why = _try_theirs(
        run, lambda: run.seconds(lambda number: run.theirs.generate(run.theirs.prepare(questions[number]), 1))
    )
    yield GpuFigure(
        key="first-token",
        name=f"first token about a {side}x{side} picture",
        unit="ms",
        ours=Spread.of(ours, 1e3),
        theirs=Spread.of(theirs, 1e3) if theirs else None,
        value=statistics.median(theirs) / statistics.median(ours) if theirs else None,
        of="x transformers'",
        about=why.removeprefix("; "),
    )


def overlap(run: GpuRun) -> Iterator[GpuFigure]:
    """The part of the device's waiting for the host that goes when the next step is prepared meanwhile."""
    batch = run.load.overlap_batch
    on, off = run.decoded(batch), run.engine.decode(batch, disable_overlap_schedule=True)
    yield GpuFigure(
        key="overlap",
        name=f"overlap, decode step of {batch}",
        unit="ms",
        ours=Spread.of(on.seconds, 1e3),
        value=1 - on.host / off.host if off.host else 1.0,
        of="of the CPU time hidden",
        about=f"{off.median * 1e3:.4g} ms without; the device waits {on.host * 1e3:.3g} and {off.host * 1e3:.3g} ms",
    )


def many(run: GpuRun) -> Iterator[GpuFigure]:
    """Many questions about a picture file each, and the memory that they take."""
    load, engine = run.load, run.engine
    asked = (_questions(load.many, load.many_side, seed=500 + number) for number in range(run.rounds + 3))
    engine.ask(_questions(load.alone, load.many_side, seed=900), load.answer)
    resting = torch.cuda.memory_allocated(run.device) if run.device.type == "cuda" else 0
    ours = run.seconds(lambda _: engine.ask(next(asked), load.answer), warm=False, rounds=2)
    our_peak = _peak(run.device)
    rate = load.many / statistics.median(ours)
    batched = GpuFigure(
        key="many-batched",
        name=f"{load.many} pictures of {load.many_side}x{load.many_side}, {load.answer} tokens an answer",
        unit="pictures/s",
        ours=_rates(load.many, ours),
    )
    alone = [[one] for one in _questions(load.alone, load.many_side, seed=901)]
    together, why = _try_theirs(run, lambda: _together(run, next(asked), warm=alone[0]))
    their_peak = _peak(run.device)
    if together is None:
        yield replace(batched, about=why.removeprefix("; "))
        return
    batch, taken = together
    yield replace(
        batched,
        theirs=_one(load.many / taken),
        value=rate * taken / load.many,
        of="x transformers, batched",
        about=f"transformers {batch} at a time",
    )
    seconds = run.seconds(
        lambda number: run.theirs.generate(run.theirs.prepare(alone[number - 1]), load.answer),
        warm=False,
        rounds=load.alone,
    )
    yield replace(
        batched,
        key="many-alone",
        name="the same, transformers one at a time",
        theirs=_rates(1, seconds),
        value=rate * statistics.median(seconds),
        of="x transformers, alone",
    )
    if our_peak:
        layers = engine.llm.engine.runner.kv_cache.layers
        pool = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))
        yield GpuFigure(
            key="memory",
            name="peak memory of these",
            unit="MiB",
            ours=_one(our_peak / _MIB),
            theirs=_one((their_peak - pool) / _MIB),
            about=f"ours with {pool / _MIB:.0f} MiB of KV cache; computing takes {(our_peak - resting) / _MIB:.0f} MiB",
        )


def _together(run: GpuRun, questions: Sequence[Question], *, warm: Sequence[Question]) -> tuple[int, float]:
    """Return transformers' largest batch that fits into memory, and its seconds for all questions."""
    theirs = run.theirs
    theirs.generate(theirs.prepare(warm), 2)
    batch = len(questions)

    def answer_all(_: int) -> None:
        for first in range(0, len(questions), batch):
            theirs.generate(theirs.prepare(questions[first : first + batch]), run.load.answer)

    while True:
        try:
            _peak(run.device)
            [taken] = run.seconds(answer_all, warm=False, rounds=1)
            return batch, taken
        except torch.cuda.OutOfMemoryError:
            if batch == 1:
                raise
            run.free()
            batch //= 2


def loading(run: GpuRun) -> Iterator[GpuFigure]:
    """A new process that loads these weights from files in the page cache, until it can answer."""
    model = run.engine.model
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        for file in run.folder.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copyfile(file, Path(made) / file.name)
        save_weights(Path(made), published_tensors(model))
        words = ["-c", _START, made, str(run.device), dtype_name(run.dtype)]
        for _ in range(2):  # the first start builds kernels
            before = time.perf_counter()
            run_python(words, "the process that was to load the weights failed", _START_TIMEOUT_S)
            seconds = time.perf_counter() - before
    yield GpuFigure(
        key="loading",
        name="a new process until it is ready",
        unit="s",
        ours=_one(seconds),
        value=seconds,
        of="s",
        about=f"{weight_bytes(model) / _MIB:.0f} MiB of weights in the page cache; kernels were built before",
    )


def delta_nets(run: GpuRun) -> Iterator[GpuFigure]:
    """A gated delta net of Qwen3.5-9B: a decode step of each batch, beside the bytes of its states, and a prompt."""
    for batch in run.load.batches:
        net = DeltaNet(run, batch)
        seconds = run.seconds(net.decoding(batch))
        yield GpuFigure(
            key=f"delta-net-{batch}",
            name=f"gated delta net, decode step of {batch}",
            unit="ms",
            ours=Spread.of(seconds, 1e3),
            value=net.bandwidth(batch, seconds) / run.ceilings.bandwidth,
            of="of the rate of copying",
            about="a layer of Qwen3.5-9B, launched kernel by kernel",
        )
    tokens = run.load.prompt
    seconds = run.seconds(DeltaNet(run, 1).reading(tokens))
    name = f"gated delta net, prefill of {tokens} tokens"
    yield GpuFigure(key="delta-net-prefill", name=name, unit="tokens/s", ours=_rates(tokens, seconds))


PARTS: Mapping[str, Callable[[GpuRun], Iterator[GpuFigure]]] = MappingProxyType(
    {
        "ceilings": ceilings,
        "agreement": agreement,
        "decode": decode,
        "prefill": prefill,
        "tower": tower,
        "first-token": first_token,
        "overlap": overlap,
        "many": many,
        "delta-nets": delta_nets,
        "loading": loading,
    }
)
"""The parts, the most important first, should the time run out."""


def measured(part: str, run: GpuRun) -> Iterator[GpuFigure]:
    """Yield the figures of a part as they come. A failure is a figure that says so, and the next part goes on."""
    if run.budget.left <= 0:
        yield GpuFigure(key=part, name=part, error="no time was left for it (--budget-s)")
        return
    try:
        yield from PARTS[part](run)
    except Exception as error:
        yield GpuFigure(key=part, name=part, error=_words(error))
        run.free()


def _try_theirs(run: GpuRun, ask: Callable[[], T]) -> tuple[T | None, str]:
    """Return what transformers came to, and ""; or None, and why it failed. Our figure is shown all the same."""
    try:
        return ask(), ""
    except Exception as error:
        why = f"; transformers failed: {_words(error)}"
    run.free()
    return None, why


def _words(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _one(value: float) -> Spread:
    return Spread.of([value])


def _rates(done: float, seconds: Sequence[float]) -> Spread:
    return Spread.of([done / second for second in seconds])


def _pictures(folder: Path, count: int, side: int) -> list[tuple[TemporalPatch, ...]]:
    processor = make_processor(folder, read_hf_config(folder))
    images = (decode_image(jpeg(side, side, seed), processor.limits.decode) for seed in range(count))
    return [temporal_patches(data_item(processor.process_image(image))) for image in images]


def _questions(count: int, side: int, *, seed: int) -> list[Question]:
    return [replace(question, text=_QUESTION) for question in make_questions(count, side=side, seed=seed)]


def _peak(device: torch.device) -> int:
    """Return the most bytes that were allocated since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
