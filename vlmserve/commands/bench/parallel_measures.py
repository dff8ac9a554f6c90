"""What `vlmserve bench parallel` measures, one function a part. All ratios are of alternatives that took turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vlmserve.commands.bench.interleaved import Spread, ratios
from vlmserve.commands.bench.measure import Measure
from vlmserve.commands.bench.parallel_machine import Machine
from vlmserve.commands.bench.parallel_subject import MOE_SIZES, Engine, Server, Subject, Work, dense_folder, moe_folder
from vlmserve.commands.bench.quiet import CpuWatch, wait_until_quiet
from vlmserve.commands.bench.random_checkpoint import TEXT_SIZES
from vlmserve.config.engine_args import EngineArgs

_BYTES = 2  # of an element in bfloat16
OTHERS = "cores that others took meanwhile"
_MACHINE = "what the machine gives two processes of one thread over one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """layers: of the dense model; moe_layers: of the mixture of experts and the dense model beside it. rounds: in which
    alternatives take turns. wait_s: that each waits for a quiet machine, at the most."""

    folder: Path
    layers: int
    moe_layers: int
    rounds: int
    work: Work
    wait_s: float = 0.0


def measure_tensor_parallel(plan: Plan) -> list[Measure]:
    """Two processes that share every layer, with as many requests as one process has."""
    with ExitStack() as stack:
        pair = _engine(_dense(plan), plan.work, stack, tp_size=2)
        found = _beside_one(plan, _engine(_dense(plan), plan.work, stack), pair)
        exchanged = pair.exchanged()
    about = "two tensor-parallel processes over one"
    measures = _gains(found, about, target=0.8)
    hidden = TEXT_SIZES["hidden_size"]
    sums = exchanged.counts["all_reduce"] / exchanged.steps
    moved = exchanged.bytes["all_reduce"] / exchanged.tokens
    counted = "counted, beside what there has to be: two sums a layer and one of the embedding"
    # what is not needed is too much, and what is missing would be wrong
    return [
        *measures,
        _exact("sums in a step, over 2 a layer + 1", sums / (2 * plan.layers + 1), counted),
        _exact("bytes summed up for a token, likewise", moved / ((2 * plan.layers + 1) * hidden * _BYTES), counted),
    ]


def measure_pipeline(plan: Plan) -> list[Measure]:
    """Two stages of half the layers, each with as many requests as one process has."""
    with ExitStack() as stack:
        pair = _engine(_dense(plan), plan.work, stack, pp_size=2)
        found = _beside_one(plan, _engine(_dense(plan), plan.work, stack), pair)
        exchanged = pair.exchanged()
    about = "a pipeline of two processes over one, with as many requests a micro-batch"
    counted = "counted, beside what there has to be: one tensor a step, of a row a token"
    row = TEXT_SIZES["hidden_size"] * _BYTES
    return [
        *_gains(found, about, target=0.85),
        _exact("tensors sent in a step", exchanged.counts["send"] / exchanged.steps, counted),
        _exact("bytes sent for a token, over a row", exchanged.bytes["send"] / exchanged.tokens / row, counted),
    ]


def measure_data_parallel(plan: Plan) -> list[Measure]:
    """Two replicas, each with as many requests as one process has."""
    with ExitStack() as stack:
        alone, pair = (stack.enter_context(closing(Server(_dense(plan), plan.work, count))) for count in (1, 2))
        found = _beside_one(plan, alone, pair)
    return _gains(found, "a server of two replicas over one of one, with as many requests each", target=0.95)


def measure_experts(plan: Plan) -> list[Measure]:
    """A mixture of experts at batch 1 beside a dense model with as many weights for a token, in one process: in CPU
    time, which others on the machine lengthen less."""
    work = Work(requests=1, steps=plan.work.steps, prompt=plan.work.prompt)
    wide = MOE_SIZES["num_experts_per_tok"] * MOE_SIZES["moe_intermediate_size"]
    kv_heads = MOE_SIZES["num_key_value_heads"]
    with ExitStack() as stack:
        sparse = _engine(moe_folder(plan.folder / "moe", plan.moe_layers), work, stack, clock=time.process_time)
        dense = dense_folder(
            plan.folder / "beside",
            plan.moe_layers,
            intermediate_size=wide,
            num_key_value_heads=kv_heads,
            vocab_size=MOE_SIZES["vocab_size"],
        )
        even = _engine(dense, work, stack, clock=time.process_time)
        found = in_rounds({"sparse": sparse.decode_seconds, "dense": even.decode_seconds}, plan.rounds, plan.wait_s)
    return [
        Measure(
            name="CPU time of a decode step of one request",
            spread=ratios(found["sparse"], found["dense"]),
            target=1.3,
            bound="at most",
            about=f"128 experts of which a token goes through 8, {plan.moe_layers} layers, beside a dense model with "
            "as many weights for a token",
        ),
        Measure(name=OTHERS, spread=Spread.of(found[OTHERS]), unit="cores", about="in all rounds"),
    ]


PARTS: Mapping[str, Callable[[Plan], list[Measure]]] = {
    "tp": measure_tensor_parallel,
    "pp": measure_pipeline,
    "dp": measure_data_parallel,
    "moe": measure_experts,
}


def parts_here() -> list[str]:
    """Those that this version can run."""
    settings = {field.name for field in fields(EngineArgs)}
    return [part for part in PARTS if part == "moe" or f"{part}_size" in settings]


def in_rounds(
    alternatives: Mapping[str, Callable[[], float]], rounds: int, wait_s: float = 0.0
) -> dict[str, list[float]]:
    """What each returns, in each round; all once before, to warm up. OTHERS: cores that others took meanwhile. wait_s:
    see `Plan`."""
    found: dict[str, list[float]] = {name: [] for name in (*alternatives, OTHERS)}
    for number in range(rounds + 1):
        if number:
            wait_until_quiet((), wait_s)
        watch = CpuWatch(())
        values = {name: function() for name, function in alternatives.items()}
        values[OTHERS] = watch.cores()[1]
        if number:
            for name, value in values.items():
                found[name].append(value)
    return found


def _dense(plan: Plan) -> Path:
    return dense_folder(plan.folder / "dense", plan.layers)


def _beside_one(plan: Plan, alone: Subject, pair: Subject) -> dict[str, list[float]]:
    """What two processes, one process and the machine took in each round, in seconds for equal work."""
    more = pair.requests / alone.requests
    with closing(Machine()) as machine:
        alternatives = {
            "reads of one": lambda: machine.seconds("reads", 1),
            "reads of two": lambda: machine.seconds("reads", 2) / 2,
            "decode of one": alone.decode_seconds,
            "decode of two": lambda: pair.decode_seconds() / more,
            "products of one": lambda: machine.seconds("products", 1),
            "products of two": lambda: machine.seconds("products", 2) / 2,
            "prefill of one": alone.prefill_seconds,
            "prefill of two": pair.prefill_seconds,
        }
        return in_rounds(alternatives, plan.rounds, plan.wait_s)


def _engine(folder: Path, work: Work, stack: ExitStack, **settings: Any) -> Engine:
    gc.collect()
    engine = Engine(folder, work, **settings)
    stack.callback(engine.close)
    return engine


def _gains(found: dict[str, list[float]], about: str, target: float) -> list[Measure]:
    measures = [Measure(name=OTHERS, spread=Spread.of(found[OTHERS]), unit="cores", about="in all rounds")]
    for done, of in (("decode", "reads"), ("prefill", "products")):
        gained = [one / two for one, two in zip(found[f"{done} of one"], found[f"{done} of two"], strict=True)]
        possible = [one / two for one, two in zip(found[f"{of} of one"], found[f"{of} of two"], strict=True)]
        part = [is_ / could for is_, could in zip(gained, possible, strict=True)]
        measures += [
            Measure(name=f"{of}, two over one", spread=Spread.of(possible), about=_MACHINE),
            Measure(name=f"{done}, one process", spread=_ms(found[f"{done} of one"]), unit="ms", about=about),
            Measure(name=f"{done}, two processes", spread=_ms(found[f"{done} of two"]), unit="ms", about=about),
            Measure(name=f"{done}, two over one", spread=Spread.of(gained), about=about),
            Measure(name=f"{done}, of what is possible", spread=Spread.of(part), target=target, about=about),
        ]
    return measures


def _ms(seconds: list[float]) -> Spread:
    return Spread.of([1000 * one for one in seconds])


def _exact(name: str, ratio: float, about: str) -> Measure:
    return Measure(name=name, spread=Spread.of([ratio]), target=1.0, bound="at most", about=about)
