"""`vlmserve bench parallel`: two processes of one thread each beside one.

Two processes share the memory of the machine. So their gain is held to the gain of two processes that only read weights
(for decoding) or multiply (for prompts), in the same run.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, ratios, show_and_write
from vlmserve.commands.bench.parallel_subject import (
    EngineSubject,
    Machine,
    ParallelSubject,
    ServerSubject,
    TextLoad,
    dense_folder,
)
from vlmserve.commands.bench.processes import CpuWatch, wait_until_quiet
from vlmserve.config.number_words import not_negative, positive

_ABOUT = """\
Two processes of one thread each that share a model (tensor parallel, a pipeline) or have one each (data parallel),
beside one process, and beside what the machine gives two.
"""
_LAYERS = 28
OTHERS = "cores that others took meanwhile"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRun:
    """A measurement in rounds in which alternatives take turns.

    folder: of the model. Each round waits `wait_s` seconds for a quiet machine, at the most.
    """

    folder: Path
    rounds: int
    load: TextLoad
    wait_s: float = 0.0


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for, and print a line for each figure."""
    parser = bench_parser("parallel", _ABOUT, rounds=5, parts=PARTS)
    add = parser.add_argument
    add("--layers", type=positive, default=_LAYERS, help="layers of the model")
    text = "requests that decode together in one process, a micro-batch, a replica"
    add("--requests", type=positive, default=4, help=text)
    add("--steps", type=positive, default=24, help="tokens of each answer")
    add("--prompt", type=positive, default=256, help="tokens of each prompt whose prefill is timed")
    text = "seconds that each round waits for others to leave the machine alone, at the most"
    add("--wait-s", type=not_negative, default=10, help=text)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        run = ParallelRun(
            folder=dense_folder(Path(folder) / "model", args.layers),
            rounds=args.rounds,
            load=TextLoad(requests=args.requests, steps=args.steps, prompt=args.prompt),
            wait_s=args.wait_s,
        )
        print(
            f"random bfloat16 weights in the shape of Qwen3-0.6B, {args.layers} of its {_LAYERS} layers; one thread a "
            f"process; {args.requests} requests, {args.steps} tokens each, prompts of {args.prompt}; "
            f"rounds: {run.rounds}",
            flush=True,
        )
        show_and_write(args, {part: PARTS[part](run) for part in args.parts})
    return 0


def _compare(
    run: ParallelRun, *, make: Callable[..., ParallelSubject], about: str, target: float, **settings: int
) -> Iterator[Measure]:
    """Compare two processes with one, with as many requests in each process or micro-batch. settings: of the two."""
    with ExitStack() as stack:
        gc.collect()
        pair, alone = (stack.enter_context(closing(make(run.folder, run.load, **given))) for given in (settings, {}))
        found = _beside_one(run, alone, pair)
    yield from _gains(found, about, target)


PARTS: Mapping[str, Callable[[ParallelRun], Iterator[Measure]]] = {
    "tp": partial(_compare, make=EngineSubject, about="two tensor-parallel processes over one", target=0.8, tp_size=2),
    "pp": partial(
        _compare,
        make=EngineSubject,
        about="a pipeline of two processes over one, with as many requests a micro-batch",
        target=0.85,
        pp_size=2,
    ),
    "dp": partial(
        _compare,
        make=ServerSubject,
        about="a server of two replicas over one of one, with as many requests each",
        target=0.95,
        dp_size=2,
    ),
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


def _gains(found: dict[str, list[float]], about: str, target: float) -> Iterator[Measure]:
    yield Measure(name=OTHERS, spread=Spread.of(found[OTHERS]), unit="cores", about="in all rounds")
    gains = {
        of: [one / two for one, two in zip(found[f"{of} of one"], found[f"{of} of two"], strict=True)]
        for of in ("reads", "products", "decode", "prefill")
    }
    for of in ("reads", "products"):
        text = "what the machine gives two processes of one thread over one"
        yield Measure(name=f"{of}, two over one", spread=Spread.of(gains[of]), about=text)
    for done, of in (("decode", "reads"), ("prefill", "products")):
        for count, processes in (("one", "one process"), ("two", "two processes")):
            spread = Spread.of(found[f"{done} of {count}"], 1e3)
            yield Measure(name=f"{done}, {processes}", spread=spread, unit="ms", about=about)
        yield Measure(name=f"{done}, two over one", spread=Spread.of(gains[done]), about=about)
        part = ratios(gains[done], gains[of])
        yield Measure(name=f"{done}, of what is possible", spread=part, target=target, about=about)
