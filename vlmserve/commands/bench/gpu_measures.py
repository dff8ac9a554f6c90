"""The figures of `vlmserve bench gpu`, part by part: ours beside what the device can, and beside transformers."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from PIL import Image

from processors.families.base import ProcessorLimits, data_item
from processors.families.registry import make_processor
from processors.image.decoding import DecodeLimits, decode_image
from vision.towers.runner import TowerRunner, pixel_values
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve.commands.bench.gpu_ceilings import Ceilings, measure_ceilings
from vlmserve.commands.bench.gpu_counts import count_decode
from vlmserve.commands.bench.gpu_engine import DecodeSteps, Engine
from vlmserve.commands.bench.gpu_figures import Figure
from vlmserve.commands.bench.gpu_kernels import QWEN3_8B, LayerSizes, kernel_figures
from vlmserve.commands.bench.gpu_loading import seconds_until_ready
from vlmserve.commands.bench.gpu_shapes import Work
from vlmserve.commands.bench.interleaved import Spread
from vlmserve.commands.bench.media import jpeg
from vlmserve.commands.bench.questions import Question, make_questions
from vlmserve.commands.bench.reference import Reference, ReferenceTower, check_logits, check_rows, share_weights
from vlmserve.commands.bench.vision_subject import finish, grid_thw
from vlmserve.models.floors import decode_bytes, prefill_flops, tower_flops
from vlmserve.models.random_weights import random_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.errors import EngineError

T = TypeVar("T")

_MIB = 2**20
_QUESTION = "What is shown? Answer in a few words."  # as long for each, so that transformers needs no padding
_THEIR_STEPS = 8
_COUNTED_REQUESTS = 2
_TINY_LAYER = LayerSizes(
    hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=300, tokens=(1, 3), sampled=(2,)
)


class Budget:
    """Seconds that all may take. clock: seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._until - self._clock()

    def rounds(self, most: int) -> Iterator[int]:
        """0, 1 ... while there is time for one more that takes as long as the one before; 0 in any case."""
        longest = 0.0
        for number in range(most):
            before = self._clock()
            if number and self.left < longest:
                return
            yield number
            longest = max(longest, self._clock() - before)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the parts share; each thing is made when the first part needs it. folder: of the model, whose weights are
    random unless `load_format` says otherwise. Close it."""

    folder: Path
    work: Work
    device: torch.device
    dtype: torch.dtype
    rounds: int
    budget: Budget
    load_format: str = "dummy"

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        """Measured before anything else is in the device's memory."""
        found = measure_ceilings(
            self.device, self.dtype, copy_bytes=self.work.copy_bytes, gemms=self.work.gemms, rounds=self.rounds
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    @functools.cached_property
    def engine(self) -> Engine:
        """Ours."""
        return Engine(self.folder, self.work, device=self.device, dtype=self.dtype, load_format=self.load_format)

    @functools.cached_property
    def theirs(self) -> Reference:
        """transformers', over the same memory."""
        model = share_weights(self.folder, self.engine.model, device=self.device)
        return Reference(self.folder, model, device=self.device)

    @functools.cached_property
    def outline(self) -> VisionLanguageModel:
        """Its sizes."""
        return random_model(self.folder, "meta", self.dtype)

    @functools.cached_property
    def _decoded(self) -> dict[int, DecodeSteps]:
        return {}

    def decoded(self, batch: int) -> DecodeSteps:
        """Steps with all settings as they are; measured once."""
        if batch not in self._decoded:
            self.engine.decode(batch)  # what is built late, and captured
            self._decoded[batch] = self.engine.decode(batch)
        return self._decoded[batch]

    def close(self) -> None:
        """End the engine."""
        if "engine" in self.__dict__:
            self.engine.close()

    def seconds(self, run: Callable[[int], object], *, warm: bool = True, rounds: int | None = None) -> list[float]:
        """Of each round of run(number), until the device has computed it; numbers are 0 (to warm up), 1, 2 ..."""
        if warm:
            run(0)
        taken = []
        for number in self.budget.rounds(rounds or self.rounds):
            finish(self.device)
            before = time.perf_counter()
            run(number + 1)
            finish(self.device)
            taken.append(time.perf_counter() - before)
        return taken


def ceilings(bench: Bench) -> Iterator[Figure]:
    """What all else is compared with."""
    found = bench.ceilings
    about = f"{bench.work.copy_bytes / _MIB:.0f} MiB, bytes read and written"
    yield Figure(key="copy", name="copying", unit="GB/s", ours=_one(found.bandwidth / 1e9), about=about)
    about = f"{found.rows} x {found.rows} x {found.rows}, the best of {', '.join(map(str, bench.work.gemms))}"
    yield Figure(key="gemm", name="matrix product", unit="TFLOP/s", ours=_one(found.flops / 1e12), about=about)


def agreement(bench: Bench) -> Iterator[Figure]:
    """Whether both do the same work. AssertionError where they do not."""
    [question] = make_questions(1, side=bench.work.many_side, seed=1000)
    ours, theirs = bench.engine.first_logits(question), bench.theirs.logits(bench.theirs.prepare(question))
    off = check_logits(ours, theirs, bench.dtype)
    yield Figure(key="logits", name="logits, distance to transformers'", ours=_one(off), about="a part of their length")


def decode(bench: Bench) -> Iterator[Figure]:
    """Steps of so many requests, each with its context."""
    for batch in bench.work.batches:
        key, name = f"decode-{batch}", f"decode step of {batch}"
        try:
            steps = bench.decoded(batch)
        except Exception as error:  # a batch without room: the others are measured all the same
            yield Figure(key=key, name=name, error=_words(error))
            continue
        floor = decode_bytes(bench.outline, steps.kv_tokens, requests=batch) / bench.ceilings.bandwidth
        theirs, why = None, ""
        if batch < max(bench.work.batches):
            theirs, why = _theirs(bench, partial(_their_step, bench, batch))
        about = f"floor {floor * 1e3:.3g} ms; {bench.work.context} tokens of context; {len(steps.seconds)} steps"
        yield Figure(
            key=key,
            name=name,
            unit="ms",
            ours=Spread.of([second * 1e3 for second in steps.seconds]),
            theirs=theirs,
            value=steps.median / floor,
            of="x the floor",
            about=about + why,
        )


def _their_step(bench: Bench, batch: int) -> Spread:
    prompts = bench.engine.prompts(batch, bench.work.context)
    short, long = (
        min(bench.seconds(_ignoring(partial(bench.theirs.answer, prompts, tokens)), rounds=1))
        for tokens in (1, 1 + _THEIR_STEPS)
    )
    return _one((long - short) / _THEIR_STEPS * 1e3)


def prefill(bench: Bench) -> Iterator[Figure]:
    """One long prompt, and a token."""
    tokens = bench.work.prompt
    prompts = [bench.engine.prompts(1, tokens, seed=number) for number in range(bench.rounds + 1)]
    ours = bench.seconds(lambda number: bench.engine.answer(prompts[number], 1))
    theirs, why = _theirs(bench, lambda: bench.seconds(lambda number: bench.theirs.answer(prompts[number], 1)))
    reached = prefill_flops(bench.outline, tokens) / statistics.median(ours)
    yield Figure(
        key="prefill",
        name=f"prefill of {tokens} tokens",
        unit="tokens/s",
        ours=_rates(tokens, ours),
        theirs=_rates(tokens, theirs) if theirs else None,
        value=reached / bench.ceilings.flops,
        of="of the GEMM rate",
        about=f"{reached / 1e12:.4g} TFLOP/s{why}",
    )


def tower(bench: Bench) -> Iterator[Figure]:
    """Pictures to embeddings in one batch, which are compared first."""
    work, visual = bench.work, bench.engine.model.visual
    pictures = _pictures(bench.folder, work.pictures, work.side)
    patches = [patch for picture in pictures for patch in picture]
    grids = [grid_thw(picture) for picture in pictures]
    values = pixel_values(patches, bench.device)
    reference = ReferenceTower(bench.theirs.model, device=bench.device, dtype=bench.dtype)

    @torch.inference_mode()
    def encode(_: int) -> torch.Tensor:
        return visual(values, grids)

    off = check_rows(encode(0), reference.encode(values, grids))
    ours = bench.seconds(encode)
    theirs = bench.seconds(lambda _: reference.encode(values.to(bench.dtype), grids))
    reached = tower_flops(bench.outline.visual, len(pictures), patches[0].num_patches) / statistics.median(ours)
    yield Figure(
        key="tower",
        name=f"tower, {len(pictures)} pictures of {work.side}x{work.side}",
        unit="patches/s",
        ours=_rates(len(values), ours),
        theirs=_rates(len(values), theirs),
        value=reached / bench.ceilings.flops,
        of="of the GEMM rate",
        about=f"{reached / 1e12:.4g} TFLOP/s; embeddings are within {off:.2g} of each other",
    )
    runner = TowerRunner(visual, bench.device)
    from_host = bench.seconds(lambda _: runner.encode(patches))
    about = "pixels in the host's memory first"
    yield Figure(
        key="encode", name="the same, uploaded", unit="patches/s", ours=_rates(len(values), from_host), about=about
    )


def first_token(bench: Bench) -> Iterator[Figure]:
    """About a picture nobody has seen, from its file on; for both by the same processor."""
    side = bench.work.side
    questions = make_questions(bench.rounds + 1, side=side, seed=0)
    ours = bench.seconds(lambda number: bench.engine.ask([questions[number]], 1))
    theirs, why = _theirs(
        bench,
        lambda: bench.seconds(lambda number: bench.theirs.generate(bench.theirs.prepare(questions[number]), 1)),
    )
    yield Figure(
        key="first-token",
        name=f"first token about a {side}x{side} picture",
        unit="ms",
        ours=Spread.of([second * 1e3 for second in ours]),
        theirs=Spread.of([second * 1e3 for second in theirs]) if theirs else None,
        value=statistics.median(theirs) / statistics.median(ours) if theirs else None,
        of="x transformers'",
        about=why.removeprefix("; "),
    )


def overlap(bench: Bench) -> Iterator[Figure]:
    """How much of the time that the device waits for the host in a step is gone when the next one is prepared
    meanwhile."""
    batch = bench.work.overlap_batch
    on, off = bench.decoded(batch), bench.engine.decode(batch, disable_overlap_schedule=True)
    yield Figure(
        key="overlap",
        name=f"overlap, decode step of {batch}",
        unit="ms",
        ours=Spread.of([second * 1e3 for second in on.seconds]),
        value=1 - on.host / off.host if off.host else 1.0,
        of="of the CPU time hidden",
        about=f"{off.median * 1e3:.4g} ms without; the device waits {on.host * 1e3:.3g} and {off.host * 1e3:.3g} ms",
    )


def graphs(bench: Bench) -> Iterator[Figure]:
    """Decode steps launched kernel by kernel."""
    for batch in sorted({min(bench.work.batches), bench.work.overlap_batch}):
        replayed = bench.decoded(batch)
        with bench.engine.without_graphs():
            eager = bench.engine.decode(batch)
        yield Figure(
            key=f"graphs-{batch}",
            name=f"CUDA graphs, decode step of {batch}",
            unit="ms",
            ours=Spread.of([second * 1e3 for second in replayed.seconds]),
            value=eager.median / replayed.median,
            of="x as fast as without",
            about=f"{eager.median * 1e3:.4g} ms without",
        )


def many(bench: Bench) -> Iterator[Figure]:
    """Many questions about a picture each, from the files on; and what memory that takes."""
    work, engine = bench.work, bench.engine
    asked = iter(_many(work.many, work.many_side, bench.rounds + 1))
    engine.ask(_questions(work.alone, work.many_side, seed=900), work.answer)
    resting = _memory(bench.device)
    ours = bench.seconds(lambda _: engine.ask(next(asked), work.answer), warm=False, rounds=2)
    our_peak = _peak(bench.device)
    rate = work.many / statistics.median(ours)
    same = f"{work.many} pictures of {work.many_side}x{work.many_side}, {work.answer} tokens an answer"
    alone = _questions(work.alone, work.many_side, seed=901)
    together, why = _theirs(bench, lambda: _together(bench, next(asked), warm=alone[0]))
    their_peak = _peak(bench.device)
    if together is None:
        yield Figure(key="many-batched", name=same, unit="pictures/s", ours=_rates(work.many, ours), about=why[2:])
        return
    batch, taken = together
    yield Figure(
        key="many-batched",
        name=same,
        unit="pictures/s",
        ours=_rates(work.many, ours),
        theirs=_one(work.many / taken),
        value=rate * taken / work.many,
        of="x transformers, batched",
        about=f"transformers {batch} at a time",
    )
    seconds = bench.seconds(
        lambda number: bench.theirs.generate(bench.theirs.prepare(alone[number - 1]), work.answer),
        warm=False,
        rounds=work.alone,
    )
    yield Figure(
        key="many-alone",
        name="the same, transformers one at a time",
        unit="pictures/s",
        ours=_rates(work.many, ours),
        theirs=_rates(1, seconds),
        value=rate * statistics.median(seconds),
        of="x transformers, alone",
    )
    if our_peak:
        pool = sum(
            part.nbytes for layer in engine.llm.engine.runner.kv_cache.layers for part in (layer.keys, layer.values)
        )
        yield Figure(
            key="memory",
            name="peak memory of these",
            unit="MiB",
            ours=_one(our_peak / _MIB),
            theirs=_one((their_peak - pool) / _MIB),
            about=f"ours with {pool / _MIB:.0f} MiB of KV cache; computing takes {(our_peak - resting) / _MIB:.0f} MiB",
        )


def _together(bench: Bench, questions: Sequence[Question], *, warm: Question) -> tuple[int, float]:
    """transformers' largest batch that its memory has room for, and the seconds for all. warm: what it answers
    before."""
    bench.theirs.generate(bench.theirs.prepare(warm), 2)
    batch = len(questions)
    while True:
        try:
            _peak(bench.device)
            [taken] = bench.seconds(_ignoring(partial(_answer_all, bench, questions, batch)), warm=False, rounds=1)
            return batch, taken
        except torch.cuda.OutOfMemoryError:
            if batch == 1:
                raise
            torch.cuda.empty_cache()
            batch //= 2


def _answer_all(bench: Bench, questions: Sequence[Question], batch: int) -> None:
    for first in range(0, len(questions), batch):
        bench.theirs.generate(bench.theirs.prepare_batch(questions[first : first + batch]), bench.work.answer)


def resizing(bench: Bench) -> Iterator[Figure]:
    """Decoded pictures to the tower's values, resized on the device; beside resizing by the CPU."""
    count, side = bench.work.pictures, bench.work.side + 8  # which is not a multiple of a patch
    here, there = (partial(_resized_values, bench, count, side, later) for later in (False, True))
    if not torch.equal(here(), there()):
        raise EngineError("pictures that are resized on the device are not those of the CPU")
    by_cpu, ours = (bench.seconds(_ignoring(run)) for run in (here, there))
    yield Figure(
        key="resizing",
        name=f"resizing on the device, {count} pictures of {side}x{side}",
        unit="pictures/s",
        ours=_rates(count, ours),
        value=statistics.median(by_cpu) / statistics.median(ours),
        of="x as fast as by the CPU",
        about="from decoded pictures to values on the device",
    )


def loading(bench: Bench) -> Iterator[Figure]:
    """A process that loads these weights from files in the page cache, until it can answer."""
    seconds, weights = seconds_until_ready(bench.engine.model, bench.folder, device=bench.device, dtype=bench.dtype)
    yield Figure(
        key="loading",
        name="a new process until it is ready",
        unit="s",
        ours=_one(seconds),
        value=seconds,
        of="s",
        about=f"{weights / _MIB:.0f} MiB of weights in the page cache; kernels were built before",
    )


def counts(bench: Bench) -> Iterator[Figure]:
    """What a greedy decode step asks of a GPU, counted on a CPU."""
    requests = _COUNTED_REQUESTS
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        found = count_decode(Path(made), requests=requests)
    step = found.step
    layer, beside = (", ".join(f"{n} {name}" for name, n in some.items()) for some in (found.layer, found.beside))
    for key, name, value, unit, about in (
        ("launches-layer", "decode step, launches of a layer", found.layer.total(), "", layer),
        ("launches-beside", "launches beside the layers", found.beside.total(), "", beside),
        ("uploads", "copies to the device", step.uploads, "", ""),
        ("upload-bytes", "bytes of these, a request", step.upload_bytes / requests, "bytes", ""),
        ("downloads", "copies back", step.downloads, "", ""),
        ("download-bytes", "bytes of these, a request", step.download_bytes / requests, "bytes", ""),
    ):
        yield Figure(key=key, name=name, unit=unit, ours=_one(value), value=value, about=about)


def kernels(bench: Bench) -> Iterator[Figure]:
    """Fused operators one by one, beside torch's, in the sizes of Qwen3-VL-8B; on a CPU, in tiny ones."""
    sizes = QWEN3_8B if bench.device.type == "cuda" else _TINY_LAYER
    for one in kernel_figures(bench.device, dtype=bench.dtype, sizes=sizes, rounds=bench.rounds):
        reached = one.moved / one.ours.median
        yield Figure(
            key=f"kernel-{one.name}",
            name=one.name,
            unit="us",
            ours=Spread.of([second * 1e6 for second in (one.ours.median, one.ours.least, one.ours.most)]),
            value=one.theirs.median / one.ours.median,
            of="x as fast as torch",
            about=f"torch {one.theirs.median * 1e6:.4g} us; {reached / bench.ceilings.bandwidth:.2f} of the bandwidth",
        )


PARTS: Mapping[str, Callable[[Bench], Iterator[Figure]]] = MappingProxyType(
    {
        "ceilings": ceilings,
        "agreement": agreement,
        "decode": decode,
        "prefill": prefill,
        "tower": tower,
        "first-token": first_token,
        "overlap": overlap,
        "graphs": graphs,
        "many": many,
        "resizing": resizing,
        "loading": loading,
        "kernels": kernels,
        "counts": counts,
    }
)
"""In the order of what would be missed most, should the time run out."""


def measured(part: str, bench: Bench) -> Iterator[Figure]:
    """A part's figures as they come. What fails is a figure that says so, and the next part goes on."""
    if bench.budget.left <= 0:
        yield Figure(key=part, name=part, error="no time was left for it (--budget-s)")
        return
    try:
        yield from PARTS[part](bench)
    except Exception as error:
        yield Figure(key=part, name=part, error=_words(error))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _theirs(bench: Bench, run: Callable[[], T]) -> tuple[T | None, str]:
    """What transformers came to, and ""; or nothing, and why: ours is shown all the same."""
    try:
        return run(), ""
    except Exception as error:
        why = f"; transformers failed: {_words(error)}"
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return None, why


def _ignoring(run: Callable[[], object]) -> Callable[[int], object]:
    """Whatever the number of the round."""
    return lambda _: run()


def _words(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _one(value: float) -> Spread:
    return Spread.of([value])


def _rates(work: float, seconds: Sequence[float]) -> Spread:
    return Spread.of([work / second for second in seconds])


def _pictures(folder: Path, count: int, side: int) -> list[tuple[TemporalPatch, ...]]:
    """JPEG files, through the processor."""
    processor = make_processor(folder, read_hf_config(folder))
    images = (decode_image(jpeg(side, side, seed), processor.limits.decode) for seed in range(count))
    return [temporal_patches(data_item(processor.process_image(image))) for image in images]


def _resized_values(bench: Bench, count: int, side: int, later: bool) -> torch.Tensor:
    limits = ProcessorLimits(resize_later=later)
    processor = make_processor(bench.folder, read_hf_config(bench.folder), limits)
    media = (processor.process_image(image) for image in _decoded(count, side))
    return pixel_values([patch for one in media for patch in temporal_patches(data_item(one))], bench.device)


@functools.cache
def _decoded(count: int, side: int) -> list[Image.Image]:
    return [decode_image(jpeg(side, side, seed), DecodeLimits()) for seed in range(count)]


def _questions(count: int, side: int, *, seed: int) -> list[Question]:
    return [replace(question, text=_QUESTION) for question in make_questions(count, side=side, seed=seed)]


def _many(count: int, side: int, rounds: int) -> Iterator[list[Question]]:
    for number in range(rounds + 2):
        yield _questions(count, side, seed=500 + number)


def _memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    """Bytes that were allocated at the most since this was asked last; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
