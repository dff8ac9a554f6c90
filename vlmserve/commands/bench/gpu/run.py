"""A run of `vlmserve bench gpu`: the time that is left, what the device reaches, and both models, each made once.

`StepSpans` tells how long the device was at each step, by events on its stream. Between the spans of two steps the
device waits for the host. A host that is ahead shows as spans that follow each other at once.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmserve.commands.bench.checkpoints import TEXT_IDS
from vlmserve.commands.bench.media import Question
from vlmserve.commands.bench.reference import Reference, share_weights
from vlmserve.commands.bench.vision import finish
from vlmserve.commands.offline.llm import LLM
from vlmserve.engine.build import build_loop
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, PendingResult, SamplingBatchInfo
from vlmserve.frontend.request_builder import TokensPrompt
from vlmserve.ipc.messages import BatchTokenOutput, SamplingParams, SchedulerOutput, TokenizedGenerateReqInput
from vlmserve.models.random_weights import random_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError

_WARM_STEPS = 4
_MEDIA_THREADS = 8
# The part of the memory that the engine takes; transformers computes in the rest. With 80 GB, an 8B model then has room
# for 256 requests, and transformers decodes 64.
_ENGINE_SHARE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLoad:
    """The work of a run.

    The tower's batch has `pictures` of side x side pixels. A `prompt` has that many tokens. `batches` are numbers of
    requests that decode together for `steps` steps, behind `context` tokens each. `many` is a number of questions about
    a picture of many_side x many_side pixels, with `answer` tokens; `alone` of them come one at a time. `copy_bytes`
    and `gemms` are the bytes and rows that measure the device.
    """

    pictures: int = 16
    side: int = 1024
    prompt: int = 8192
    batches: tuple[int, ...] = (1, 8, 64, 256)
    overlap_batch: int = 64
    context: int = 1024
    steps: int = 32
    many: int = 256
    many_side: int = 512
    answer: int = 128
    alone: int = 8
    copy_bytes: int = 4 * 2**30
    gemms: tuple[int, ...] = (4096, 8192, 16384)

    @property
    def patch_limit(self) -> int:
        """The most patches of the tower's batch: those of 14 pixels, the smallest there are."""
        return self.pictures * (self.side // 14 + 2) ** 2


FULL = GpuLoad()
SMALL = GpuLoad(
    pictures=2,
    side=128,
    prompt=64,
    batches=(1, 4),
    overlap_batch=4,
    context=16,
    steps=4,
    many=4,
    many_side=64,
    answer=4,
    alone=1,
    copy_bytes=2**20,
    gemms=(64,),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSteps:
    """The steps in which all of a batch got a token.

    `seconds` are from one step to the next, `spans` the seconds that the device was at each. `kv_tokens` is the mean
    number of tokens that a step reads over the whole batch.
    """

    seconds: tuple[float, ...]
    spans: tuple[float, ...]
    kv_tokens: float

    @property
    def median(self) -> float:
        """The median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def host(self) -> float:
        """The seconds of a step in which the device waited for the host."""
        return max(0.0, self.median - statistics.median(self.spans))


class MeasuredEngine:
    """An engine without a prefix cache, which does equal work every time; to be closed."""

    def __init__(
        self,
        folder: Path,
        load: GpuLoad,
        *,
        device: torch.device,
        dtype: torch.dtype,
        load_format: str,
        **settings: Any,
    ) -> None:
        longest = load.context + load.steps + 2 * _WARM_STEPS + _prompt_steps(load)
        together = max(load.batches)
        given: dict[str, Any] = {
            "device": str(device),
            "dtype": dtype_name(dtype),
            "load_format": load_format,
            "cpu_kernels": "off",  # transformers could not share packed weights
            "disable_radix_cache": True,
            "encoder_cache_mib": 1024,
            "encoder_host_cache_mib": 0,
            "max_pixels": "checkpoint",
            "max_running_requests": together,
            "max_queued_requests": 2 * max(together, load.many),
            "max_model_len": max(longest, 2 * load.prompt) + 64,
            "chunked_prefill_size": load.prompt,
            "max_prefill_tokens": load.prompt,
            "max_decode_slowdown": 0,  # prompts first, and all at once
            "max_step_s": 0,
            "max_mm_workers": min(_MEDIA_THREADS, available_cpus()),
            "encoder_max_patches": load.patch_limit,
        }
        if device.type == "cuda":
            given["mem_fraction_static"] = _ENGINE_SHARE
        self.llm = LLM(str(folder), **(given | settings))
        self.load = load
        self.device = device
        self.model = self.llm.engine.runner.model

    def close(self) -> None:
        """End the engine's threads."""
        self.llm.close()

    def prompts(self, batch: int, tokens: int, *, seed: int = 0) -> np.ndarray:
        """Return ids int64 [batch, tokens] of random text."""
        return np.random.default_rng([seed, batch, tokens]).integers(0, TEXT_IDS, (batch, tokens))

    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        """Compute answers of `tokens` tokens to ids int64 [B, L] together."""
        wrapped = [TokensPrompt(ids=tuple(ids.tolist())) for ids in prompts]
        self.llm.generate(wrapped, _greedy(tokens))

    def ask(self, questions: Sequence[Question], tokens: int) -> None:
        """Answer questions about picture files together, with `tokens` tokens each."""
        self.llm.chat_batch(
            [question.messages(lambda picture: {"type": "image", "image": picture}) for question in questions],
            _greedy(tokens),
        )

    def first_logits(self, question: Question) -> torch.Tensor:
        """Return the logits of the first token of an answer, float32 [vocabulary]."""
        compute, taken = self.model.compute_logits, []

        def note(hidden: torch.Tensor) -> torch.Tensor:
            taken.append(compute(hidden))
            return taken[-1]

        self.model.compute_logits = note  # type: ignore[method-assign]
        try:
            self.ask([question], 1)
        finally:
            del self.model.compute_logits
        return taken[0][-1].float()

    def decode(self, batch: int, **settings: Any) -> DecodeSteps:
        """Decode `batch` requests together. settings: of the scheduler, for this time.

        Raises EngineError if there is no room for them.
        """
        load = self.load
        tokens = load.steps + 2 * _WARM_STEPS + _prompt_steps(load) * (batch > 1)
        needed, there = batch * (load.context + tokens + 16), self.llm.info.max_total_tokens
        if needed > there:
            raise EngineError(f"{batch} requests need {needed} KV slots, and there is room for {there}")
        args, engine = replace(self.llm.args, **settings), self.llm.engine
        spans, steps = StepSpans(engine.runner), list[_Step]()

        def note(output: SchedulerOutput) -> None:
            assert isinstance(output, BatchTokenOutput)
            for one in output.outputs:
                if one.finish_reason and one.finish_reason.type == "error":
                    raise EngineError(one.finish_reason.message)
            read = sum(one.prompt_tokens + one.completion_tokens - 1 for one in output.outputs)
            steps.append(_Step(time.perf_counter(), len(output.outputs), read))

        with closing(build_loop(args, engine.runner, engine.info, note, worker=spans)) as loop:
            for number, ids in enumerate(self.prompts(batch, load.context)):
                loop.handle(TokenizedGenerateReqInput(rid=f"r{number}", input_ids=ids, sampling_params=_greedy(tokens)))
            while not loop.is_idle():
                loop.step_or_wait()
        full = [step for step in steps if step.requests == batch][_WARM_STEPS:]
        if len(full) < 3:
            raise EngineError(f"only {len(full)} steps had all {batch} requests in them")
        return DecodeSteps(
            seconds=tuple(b.at - a.at for a, b in itertools.pairwise(full)),
            spans=spans.of(batch)[_WARM_STEPS:],
            kv_tokens=statistics.mean(step.kv_tokens for step in full),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """A step. at: when its tokens came. kv_tokens: that it read, over all requests."""

    at: float
    requests: int
    kv_tokens: int


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)


def _prompt_steps(load: GpuLoad) -> int:
    """Return the steps that the prompts of the largest batch take; requests that came first decode already."""
    return -(-max(load.batches) * load.context // load.prompt) + 1


class StepSpans:
    """A `ModelWorker` that notes how long the device is at each step that the runner computes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._on_gpu = runner.device.type == "cuda"
        self._spans: list[tuple[int, Any, Any]] = []  # requests, and marks at its begin and end

    def forward(self, batch: ModelWorkerBatch) -> Any:
        """Launch the forward pass behind a mark."""
        began = self._mark()
        return len(batch.seq_lens), began, self._runner.forward(batch)

    def sample(self, forwarded: Any, info: SamplingBatchInfo) -> PendingResult:
        """Launch the sampling before a mark."""
        requests, began, states = forwarded
        result = self._runner.sample(states, info)
        self._spans.append((requests, began, self._mark()))
        return result

    def _mark(self) -> Any:
        """Return a place in the device's work: an event, or on a CPU, where work is done at once, the time in s."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def of(self, requests: int) -> tuple[float, ...]:
        """Wait for the device, and return the seconds of each step of `requests` requests."""
        marks = [(began, ended) for many, began, ended in self._spans if many == requests]
        if not self._on_gpu:
            return tuple(ended - began for began, ended in marks)
        torch.cuda.synchronize(self._runner.device)
        return tuple(began.elapsed_time(ended) / 1e3 for began, ended in marks)


_COPIES, _PRODUCTS = 8, 16


class Budget:
    """The seconds that a run may take. clock: seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self._until - self._clock()

    def rounds(self, most: int) -> Iterator[int]:
        """Yield 0, and 1, 2 ... below `most` while there is time for one more round as long as the longest."""
        longest = 0.0
        for number in range(most):
            before = self._clock()
            if number and self.left < longest:
                return
            yield number
            longest = max(longest, self._clock() - before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """The limits of the device.

    `bandwidth` is the bytes that a copy inside its memory reads and writes in a second. `flops` is the operations a
    second of the fastest product of two random square matrices, which has `rows` rows.
    """

    bandwidth: float
    flops: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class GpuRun:
    """A run over one model; to be closed. What its parts share is made when the first part needs it.

    folder: of the model, whose weights are random unless `load_format` says otherwise.
    """

    folder: Path
    load: GpuLoad
    device: torch.device
    dtype: torch.dtype
    rounds: int
    budget: Budget
    load_format: str = "dummy"
    _decoded: dict[int, DecodeSteps] = field(default_factory=dict, init=False)

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        """The limits of the device, measured before anything else is in its memory."""
        device, load = self.device, self.load
        generator = torch.Generator(device).manual_seed(0)
        # random data: zeros multiply faster
        source = torch.randint(0, 256, (load.copy_bytes,), dtype=torch.uint8, device=device, generator=generator)
        target = torch.empty_like(source)
        copying = self._least_seconds(partial(target.copy_, source), _COPIES)
        del source, target
        best = (0.0, 0)
        for rows in load.gemms:
            a, b = (torch.randn(rows, rows, device=device, generator=generator).to(self.dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = self._least_seconds(partial(torch.mm, a, b, out=out), _PRODUCTS)
            best = max(best, (2.0 * rows**3 / seconds, rows))
            del a, b, out
        self.free()
        return Ceilings(bandwidth=2.0 * load.copy_bytes / copying, flops=best[0], rows=best[1])

    @functools.cached_property
    def engine(self) -> MeasuredEngine:
        """Our engine."""
        return MeasuredEngine(
            self.folder, self.load, device=self.device, dtype=self.dtype, load_format=self.load_format
        )

    @functools.cached_property
    def theirs(self) -> Reference:
        """transformers' model over the same memory."""
        model = share_weights(self.folder, self.engine.model, device=self.device)
        return Reference(self.folder, model, device=self.device)

    @functools.cached_property
    def outline(self) -> VisionLanguageModel:
        """The model without weights, for its sizes."""
        return random_model(self.folder, "meta", self.dtype)

    def decoded(self, batch: int) -> DecodeSteps:
        """Return the steps of a batch with all settings as they are, measured once."""
        if batch not in self._decoded:
            self.engine.decode(batch)  # the first time builds kernels and captures steps
            self._decoded[batch] = self.engine.decode(batch)
        return self._decoded[batch]

    def seconds(self, run: Callable[[int], object], *, warm: bool = True, rounds: int | None = None) -> list[float]:
        """Return the seconds of each round of run(number) until the device is done. Number 0 warms up."""
        if warm:
            run(0)
        return [self._timed(partial(run, number + 1)) for number in self.budget.rounds(rounds or self.rounds)]

    def _least_seconds(self, run: Callable[[], object], times: int) -> float:
        """Return the seconds of one of `times` calls that are launched together, in the best round."""

        def several() -> None:
            for _ in range(times):
                run()

        return min(self._timed(several) for _ in range(self.rounds + 1)) / times

    def _timed(self, run: Callable[[], object]) -> float:
        finish(self.device)
        before = time.perf_counter()
        run()
        finish(self.device)
        return time.perf_counter() - before

    def free(self) -> None:
        """Give unused memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the engine."""
        if "engine" in self.__dict__:
            self.engine.close()
