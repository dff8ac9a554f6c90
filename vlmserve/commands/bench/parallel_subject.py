"""The engines that `vlmserve bench parallel` compares, and what the machine gives two processes over one.

All have one thread a process, random weights and text alone.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import httpx2
import numpy as np
import torch

from vlmserve.commands.bench.gpu.shapes import TEXT_SIZES, VISION_SIZES, ModelShape, write_folder
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.commands.offline.llm import LLM
from vlmserve.config.fields import flag
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
