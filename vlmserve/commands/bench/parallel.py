"""`vlmserve bench parallel`: two processes of one thread each beside one, and experts beside a dense model.

Two processes share the memory of the machine. So their gain is held to the gain of two processes that only read weights
(for decoding) or multiply (for prompts), in the same run.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, ratios, show, write_measures
from vlmserve.commands.bench.parallel_subject import (
    MOE_SIZES,
    EngineSubject,
    Machine,
    ParallelSubject,
    ServerSubject,
    TextLoad,
    dense_folder,
    moe_folder,
)
from vlmserve.commands.bench.processes import CpuWatch, wait_until_quiet
from vlmserve.commands.bench.random_checkpoint import TEXT_SIZES
from vlmserve.config.number_words import not_negative, positive

_ABOUT = """\
Two processes of one thread each that share a model (tensor parallel, a pipeline) or have one each (data parallel),
beside one process, and beside what the machine gives two; a mixture of experts beside a dense model with as many
weights for a token.
"""
_LAYERS, _QUICK_LAYERS = 28, 4
_MOE_LAYERS, _QUICK_MOE_LAYERS = 6, 1
_ROUNDS, _QUICK_ROUNDS = 5, 2
_ROW_BYTES = 2 * TEXT_SIZES["hidden_size"]  # of a token between layers, in bfloat16
OTHERS = "cores that others took meanwhile"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRun:
    """A measurement in rounds in which alternatives take turns.

    `layers` are those of the dense model, `moe_layers` those of the mixture of experts and the model beside it.
    Each round waits `wait_s` seconds for a quiet machine, at the most.
    """

    folder: Path
    layers: int
    moe_layers: int
    rounds: int
    load: TextLoad
    wait_s: float = 0.0

    @property
    def dense(self) -> Path:
        """The checkpoint folder of the dense model, written anew."""
        return dense_folder(self.folder / "dense", self.layers)


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for, and print a line for each figure."""
    parser = bench_parser("parallel", _ABOUT)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure")
    text = f"layers of the dense model (default: {_LAYERS}, with --quick {_QUICK_LAYERS})"
    add("--layers", type=positive, help=text)
    text = f"layers of the mixture of experts (default: {_MOE_LAYERS}, with --quick {_QUICK_MOE_LAYERS})"
    add("--moe-layers", type=positive, help=text)
    text = "requests that decode together in one process, a micro-batch, a replica"
    add("--requests", type=positive, default=4, help=text)
    add("--steps", type=positive, default=24, help="tokens of each answer")
    add("--prompt", type=positive, default=256, help="tokens of each prompt whose prefill is timed")
    text = f"rounds in which the alternatives take turns (default: {_ROUNDS}, with --quick {_QUICK_ROUNDS})"
    add("--rounds", type=positive, help=text)
    text = "seconds that each round waits for others to leave the machine alone, at the most"
    add("--wait-s", type=not_negative, default=10, help=text)
    add("--quick", action="store_true", help="fewer layers and rounds")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        run = ParallelRun(
            folder=Path(folder),
            layers=args.layers or (_QUICK_LAYERS if args.quick else _LAYERS),
            moe_layers=args.moe_layers or (_QUICK_MOE_LAYERS if args.quick else _MOE_LAYERS),
            rounds=args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS),
            load=TextLoad(requests=args.requests, steps=args.steps, prompt=args.prompt),
            wait_s=args.wait_s,
        )
        print(
            f"random bfloat16 weights in the shape of Qwen3-0.6B, {run.layers} of its {_LAYERS} layers; one thread a "
            f"process; {args.requests} requests, {args.steps} tokens each, prompts of {args.prompt}; "
            f"rounds: {run.rounds}",
            flush=True,
        )
        found = {part: show(part, PARTS[part](run)) for part in args.parts}
    write_measures(args, found)
    return 0


def measure_tensor_parallel(run: ParallelRun) -> Iterator[Measure]:
    """Two processes share every layer, with as many requests as one process has."""
    with ExitStack() as stack:
        pair = _engine(run.dense, run.load, stack, tp_size=2)
        found = _beside_one(run, _engine(run.dense, run.load, stack), pair)
        exchanged = pair.exchanged()
    yield from _gains(found, "two tensor-parallel processes over one", target=0.8)
    sums = 2 * run.layers + 1
    about = "counted, beside the necessary: two sums a layer and one of the embedding"
    yield _exact("sums in a step, over 2 a layer + 1", exchanged.counts["all_reduce"] / exchanged.steps / sums, about)
    moved = exchanged.bytes["all_reduce"] / exchanged.tokens / sums / _ROW_BYTES
    yield _exact("bytes summed up for a token, likewise", moved, about)


def measure_pipeline(run: ParallelRun) -> Iterator[Measure]:
    """Two stages have half the layers each, and as many requests each as one process has."""
    with ExitStack() as stack:
        pair = _engine(run.dense, run.load, stack, pp_size=2)
        found = _beside_one(run, _engine(run.dense, run.load, stack), pair)
        exchanged = pair.exchanged()
    about = "a pipeline of two processes over one, with as many requests a micro-batch"
    yield from _gains(found, about, target=0.85)
    about = "counted, beside the necessary: one tensor a step, of a row a token"
    yield _exact("tensors sent in a step", exchanged.counts["send"] / exchanged.steps, about)
    yield _exact("bytes sent for a token, over a row", exchanged.bytes["send"] / exchanged.tokens / _ROW_BYTES, about)


def measure_data_parallel(run: ParallelRun) -> Iterator[Measure]:
    """Two replicas have as many requests each as one process has."""
    with ExitStack() as stack:
        alone, pair = (stack.enter_context(closing(ServerSubject(run.dense, run.load, count))) for count in (1, 2))
        found = _beside_one(run, alone, pair)
    yield from _gains(found, "a server of two replicas over one of one, with as many requests each", target=0.95)


def measure_experts(run: ParallelRun) -> Iterator[Measure]:
    """A mixture of experts at batch 1 beside a dense model with as many weights for a token, in one process.

    CPU time counts: other work on the machine lengthens it less.
    """
    load = replace(run.load, requests=1)
    sizes = {
        "intermediate_size": MOE_SIZES["num_experts_per_tok"] * MOE_SIZES["moe_intermediate_size"],
        "num_key_value_heads": MOE_SIZES["num_key_value_heads"],
        "vocab_size": MOE_SIZES["vocab_size"],
    }
    with ExitStack() as stack:
        folder = moe_folder(run.folder / "moe", run.moe_layers)
        sparse = _engine(folder, load, stack, clock=time.process_time)
        folder = dense_folder(run.folder / "beside", run.moe_layers, **sizes)
        dense = _engine(folder, load, stack, clock=time.process_time)
        found = in_rounds({"sparse": sparse.decode_seconds, "dense": dense.decode_seconds}, run.rounds, run.wait_s)
    yield Measure(
        name="CPU time of a decode step of one request",
        spread=ratios(found["sparse"], found["dense"]),
        target=1.3,
        bound="at most",
        about=f"128 experts of which a token goes through 8, {run.moe_layers} layers, beside a dense model with as "
        "many weights for a token",
    )
    yield Measure(name=OTHERS, spread=Spread.of(found[OTHERS]), unit="cores", about="in all rounds")


PARTS: Mapping[str, Callable[[ParallelRun], Iterator[Measure]]] = {
    "tp": measure_tensor_parallel,
    "pp": measure_pipeline,
    "dp": measure_data_parallel,
    "moe": measure_experts,
}


def in_rounds(
    alternatives: Mapping[str, Callable[[], float]], rounds: int, wait_s: float = 0.0
) -> dict[str, list[float]]:
    """Call all alternatives in every round, once before to warm up, and return the values of each.

    Also returned, as OTHERS: the cores that other processes took meanwhile. wait_s: as of `ParallelRun`.
    """
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


def _beside_one(run: ParallelRun, alone: ParallelSubject, pair: ParallelSubject) -> dict[str, list[float]]:
    """Return the seconds that two processes, one process and the machine took for equal work, in each round."""
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
        return in_rounds(alternatives, run.rounds, run.wait_s)


def _engine(folder: Path, load: TextLoad, stack: ExitStack, **settings: Any) -> EngineSubject:
    gc.collect()
    return stack.enter_context(closing(EngineSubject(folder, load, **settings)))


def _gains(found: dict[str, list[float]], about: str, target: float) -> Iterator[Measure]:
    yield Measure(name=OTHERS, spread=Spread.of(found[OTHERS]), unit="cores", about="in all rounds")
    machine, beside = {}, []
    for done, of in (("decode", "reads"), ("prefill", "products")):
        gained = [one / two for one, two in zip(found[f"{done} of one"], found[f"{done} of two"], strict=True)]
        possible = [one / two for one, two in zip(found[f"{of} of one"], found[f"{of} of two"], strict=True)]
        part = [is_ / could for is_, could in zip(gained, possible, strict=True)]
        machine[of] = Spread.of(possible)
        for count in ("one", "two"):
            name = f"{done}, {count} process{'es' * (count == 'two')}"
            beside.append(
                Measure(name=name, spread=Spread.of(found[f"{done} of {count}"], 1e3), unit="ms", about=about)
            )
        beside.append(Measure(name=f"{done}, two over one", spread=Spread.of(gained), about=about))
        name = f"{done}, of what is possible"
        beside.append(Measure(name=name, spread=Spread.of(part), target=target, about=about))
    for of, spread in machine.items():
        text = "what the machine gives two processes of one thread over one"
        yield Measure(name=f"{of}, two over one", spread=spread, about=text)
    yield from beside


def _exact(name: str, ratio: float, about: str) -> Measure:
    return Measure(name=name, spread=Spread.of([ratio]), target=1.0, bound="at most", about=about)
