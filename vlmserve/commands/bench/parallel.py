"""`vlmserve bench parallel`: two processes of one thread each beside one.

Two processes share the memory of the machine. So their gain is held to the gain of two processes that only read weights
(for decoding) or multiply (for prompts), in the same run. Weights are random, and requests have no media.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import httpx2
import numpy as np
import torch

from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, ratios, show_and_write
from vlmserve.commands.bench.gpu.shapes import TEXT_SIZES, VISION_SIZES, ModelShape, write_folder
from vlmserve.commands.bench.processes import CpuWatch, wait_until_quiet
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.commands.offline.llm import LLM
from vlmserve.config.fields import flag
from vlmserve.config.flags import not_negative, positive
from vlmserve.frontend.request_builder import TokensPrompt
from vlmserve.ipc.messages import BatchTokenOutput, SamplingParams, SchedulerOutput
from vlmserve_common.compute.linear import Linear
from vlmserve_common.kernels.library import activate
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.stop_signals import stop_signals_held

MachineWork = Literal["reads", "products"]
_INNER, _OUTER, _WEIGHTS = 1024, 6144, 24
_ROWS: dict[MachineWork, int] = {"reads": 1, "products": 256}
# A sample takes about as long as a decode step. An interruption spoils one sample only.
_OF_A_SAMPLE: dict[MachineWork, int] = {"reads": _WEIGHTS, "products": 2}
_SAMPLES = 12
_TEXT_IDS = 1600  # of the built-in model's tokenizer, without special ones
_SHORT = 8  # tokens of prompts that are there to be continued


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLoad:
    """Requests that decode together, `steps` tokens each. prompt: tokens of a prompt whose prefill is timed."""

    requests: int
    steps: int
    prompt: int


class ParallelSubject(ABC):
    """One alternative with `requests` requests at a time; to be closed."""

    def __init__(self, load: TextLoad, requests: int) -> None:
        self._load, self.requests = load, requests

    @abstractmethod
    def decode_seconds(self) -> float:
        """Return the seconds of a step in which all requests get a token."""

    def prefill_seconds(self) -> float:
        """Return the seconds of a token of a prompt while every request has a prompt."""
        return self._seconds(self._prompts(self._load.prompt), 1) / (self._load.prompt * self.requests)

    @abstractmethod
    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        """Compute answers of `tokens` tokens to ids int64 [B, L] together."""

    @abstractmethod
    def close(self) -> None:
        """End its processes."""

    def _seconds(self, prompts: np.ndarray, tokens: int) -> float:
        began = time.perf_counter()
        self.answer(prompts, tokens)
        return time.perf_counter() - began

    def _prompts(self, tokens: int) -> np.ndarray:
        """Return ids int64 [requests, tokens] of random text."""
        return np.random.default_rng([self.requests, tokens]).integers(0, _TEXT_IDS, (self.requests, tokens))


class _Watched(LLM):
    """An `LLM` that notes when tokens come, by request."""

    def __init__(self, folder: str, **settings: Any) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        super().__init__(folder, **settings)

    def _take(self, batch: SchedulerOutput) -> None:
        assert isinstance(batch, BatchTokenOutput)
        now = time.perf_counter()
        for output in batch.outputs:
            self.times[output.rid].append(now)
        super()._take(batch)


class EngineSubject(ParallelSubject):
    """An engine without a server; each stage of a pipeline has as many requests. settings: of `EngineArgs`."""

    def __init__(self, folder: Path, load: TextLoad, **settings: Any) -> None:
        super().__init__(load, load.requests * settings.get("pp_size", 1))
        self._llm = _Watched(str(folder), **(_settings(load, self.requests) | settings))

    def decode_seconds(self) -> float:  # the median between two tokens of a request
        self._llm.times.clear()
        self.answer(self._prompts(_SHORT), 1 + self._load.steps)
        return statistics.median(
            behind - before for times in self._llm.times.values() for before, behind in itertools.pairwise(times)
        )

    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        wrapped = [TokensPrompt(ids=tuple(ids.tolist())) for ids in prompts]
        self._llm.generate(wrapped, SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True))

    def close(self) -> None:
        self._llm.close()


class ServerSubject(ParallelSubject):
    """A server of several replicas with as many requests each."""

    def __init__(self, folder: Path, load: TextLoad, dp_size: int = 1) -> None:
        super().__init__(load, load.requests * dp_size)
        words = [str(folder)]
        for name, value in _settings(load, load.requests).items():
            words += [flag(name)] if value is True else [flag(name), str(value)]
        words += ["--dp-size", str(dp_size), "--served-model-name", "bench", "--log-level", "warning"]
        self._server = OwnServer(words, startup_timeout_s=600.0)
        self._threads = ThreadPoolExecutor(self.requests)

    def decode_seconds(self) -> float:  # of whole answers, their short prompts included
        return self._seconds(self._prompts(_SHORT), 1 + self._load.steps) / (1 + self._load.steps)

    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        exact = {"model": "bench", "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}

        def ask(ids: np.ndarray) -> None:
            url = f"{self._server.base_url}/v1/completions"
            answer = httpx2.post(url, json=exact | {"prompt": ids.tolist()}, timeout=600, trust_env=False)
            answer.raise_for_status()

        list(self._threads.map(ask, prompts))

    def close(self) -> None:
        self._threads.shutdown()
        self._server.close()


def _settings(load: TextLoad, requests: int) -> dict[str, Any]:
    """Return the settings of an engine or a replica."""
    longest = max(load.prompt, _SHORT) + load.steps + 64
    return {
        "device": "cpu",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "num_threads": 1,
        "disable_radix_cache": True,
        "max_running_requests": requests,
        "max_model_len": longest,
        "max_total_tokens": requests * longest,
        "chunked_prefill_size": 256,
        "max_decode_slowdown": 0,
        "max_step_s": 0,
    }


_TOWER = VISION_SIZES | {"depth": 1, "deepstack_visual_indexes": [0]}


def dense_folder(folder: Path, layers: int) -> Path:
    """Write a decoder of `layers` layers like Qwen3-0.6B's, without weights."""
    text = TEXT_SIZES | {"num_hidden_layers": layers}
    return write_folder(folder, ModelShape(what="Qwen3-0.6B", family="qwen3_vl", tied=False, text=text, vision=_TOWER))


class Machine:
    """Two processes that compute when they are told to; to be closed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._children: list[ChildProcess] = []
        for number in range(2):
            with stop_signals_held():
                child = ChildProcess(f"load-{number}", _compute, (), title=f"load {number}", log_level="warning")
                self._stack.callback(child.stop)
            self._children.append(child)
        for child in self._children:
            child.take_report()

    def seconds(self, work: MachineWork, processes: int) -> float:
        """Return the seconds that `processes` of them take at the same time, each for the same work.

        Each process counts with the median of its samples. The result is the mean over the processes.
        """
        pipes: list[Connection] = [child.pipe for child in self._children[:processes]]
        for pipe in pipes:
            pipe.send_bytes(work.encode())
        return statistics.mean(statistics.median(json.loads(pipe.recv_bytes())) for pipe in pipes)

    def close(self) -> None:
        """End the processes."""
        self._stack.close()


def _compute(parent: Parent) -> None:
    """Multiply weights of an MLP like Qwen3-0.6B's, together far larger than a cache, as the parent asks."""
    torch.set_num_threads(1)
    activate("auto", threads=1)
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(_WEIGHTS):
        weight = Linear(_INNER, _OUTER, bias=False).bfloat16()
        for parameter in weight.parameters():
            parameter.normal_(generator=generator)
        weight.pack()
        weights.append(weight)
    loads = {load: (torch.ones(rows, _INNER).bfloat16(), _OF_A_SAMPLE[load]) for load, rows in _ROWS.items()}
    turns = itertools.cycle(weights)
    parent.ready({})
    while True:
        x, count = loads["reads" if parent.receive() == b"reads" else "products"]
        samples = []
        with torch.inference_mode():
            for _ in range(_SAMPLES):
                began = time.perf_counter()
                for weight in itertools.islice(turns, count):
                    weight(x)
                samples.append(time.perf_counter() - began)
        parent.send(json.dumps(samples).encode())


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
