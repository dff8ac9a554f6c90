"""The offline engine under measurement: one model, and schedulers of other settings over it, one at a time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmserve.commands.bench.gpu_shapes import TEXT_IDS, Work
from vlmserve.commands.bench.gpu_spans import StepSpans
from vlmserve.commands.bench.questions import Question
from vlmserve.commands.offline.llm import LLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.build import build_loop
from vlmserve.engine.loop import EventLoop
from vlmserve.frontend.request_builder import TokensPrompt
from vlmserve.frontend.sampling import SamplingOverrides
from vlmserve.ipc.messages import BatchTokenOutput, SamplingParams, SchedulerOutput, TokenizedGenerateReqInput
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError

_WARM_STEPS = 4
_MEDIA_THREADS = 8
# Of the memory; transformers computes in the rest. With 80 GB an 8B model has room for 256 requests then, and in the
# rest transformers decodes 64.
_ENGINE_SHARE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSteps:
    """Steps in which all of a batch got a token. seconds: from one to the next. spans: of these, what the device was
    at it for. kv_tokens: that one reads, on average, over all of the batch."""

    seconds: tuple[float, ...]
    spans: tuple[float, ...]
    kv_tokens: float

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def host(self) -> float:
        """Seconds of a step in which the device waited for the host."""
        return max(0.0, self.median - statistics.median(self.spans))


class Engine:
    """Without a prefix cache: equal work every time. Close it."""

    def __init__(
        self, folder: Path, work: Work, *, device: torch.device, dtype: torch.dtype, load_format: str, **settings: Any
    ) -> None:
        longest = work.context + work.steps + 2 * _WARM_STEPS + _prompt_steps(work)
        together = max(work.batches)
        given: dict[str, Any] = {
            "device": str(device),
            "dtype": dtype_name(dtype),
            "load_format": load_format,
            "cpu_kernels": "off",  # packed weights are nobody else's
            "disable_radix_cache": True,
            "encoder_cache_mib": 1024,
            "encoder_host_cache_mib": 0,
            "max_pixels": "checkpoint",
            "max_running_requests": together,
            "max_queued_requests": 2 * max(together, work.many),
            "max_model_len": max(longest, 2 * work.prompt) + 64,
            "chunked_prefill_size": work.prompt,
            "max_prefill_tokens": work.prompt,
            "max_decode_slowdown": 0,  # prompts first, and all at once
            "max_step_s": 0,
            "max_mm_workers": min(_MEDIA_THREADS, available_cpus()),
            "encoder_max_patches": work.patch_limit,
        }
        if device.type == "cuda":
            given["mem_fraction_static"] = _ENGINE_SHARE
        self.llm = LLM(str(folder), **(given | settings))
        self.work = work
        self.device = device
        self.model = self.llm.engine.runner.model

    def close(self) -> None:
        """End the engine's threads."""
        self.llm.close()

    def prompts(self, batch: int, tokens: int, *, seed: int = 0) -> np.ndarray:
        """Ids int64 [batch, tokens] of random text."""
        return np.random.default_rng([seed, batch, tokens]).integers(0, TEXT_IDS, (batch, tokens))

    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        """Answers of so many tokens to ids int64 [B, L], computed together."""
        wrapped = [TokensPrompt(ids=tuple(ids.tolist())) for ids in prompts]
        self.llm.generate(wrapped, _greedy(tokens))

    def ask(self, questions: Sequence[Question], tokens: int) -> None:
        """Answers of so many tokens to questions about pictures, from their files on, computed together."""
        self.llm.chat_batch(
            [question.messages(lambda picture: {"type": "image", "image": picture}) for question in questions],
            _greedy(tokens),
        )

    def first_logits(self, question: Question) -> torch.Tensor:
        """Of an answer's first token, float32 [vocabulary]."""
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
        """So many requests that decode together. settings: of the engine, for this time; those of its scheduler only.
        EngineError where there is no room for them."""
        work = self.work
        tokens = work.steps + 2 * _WARM_STEPS + _prompt_steps(work) * (batch > 1)
        needed, there = batch * (work.context + tokens + 16), self.llm.info.max_total_tokens
        if needed > there:
            raise EngineError(f"{batch} requests need {needed} KV slots, and there is room for {there}")
        with self._loop(**settings) as (loop, noted), StepSpans(self.llm.engine.runner) as spans:
            self._handle(loop, self.prompts(batch, work.context), tokens)
            _run(loop)
        full = noted.steps_of(batch)[_WARM_STEPS:]
        if len(full) < 3:
            raise EngineError(f"only {len(full)} steps had all {batch} requests in them")
        return DecodeSteps(
            seconds=tuple(b.at - a.at for a, b in itertools.pairwise(full)),
            spans=spans.of(batch)[_WARM_STEPS:],
            kv_tokens=statistics.mean(step.kv_tokens for step in full),
        )

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Decoding kernel by kernel. EngineError where that is so anyway."""
        runner: Any = self.llm.engine.runner
        graphs = getattr(runner, "_graphs", None)
        if graphs is None:
            raise EngineError("there are no CUDA graphs in this engine")
        runner._graphs = None
        try:
            yield
        finally:
            runner._graphs = graphs

    @contextmanager
    def _loop(self, **settings: Any) -> Iterator[tuple[EventLoop, _Noted]]:
        args: EngineArgs = replace(self.llm.args, **settings)
        noted = _Noted()
        engine = self.llm.engine
        with closing(build_loop(args, engine.runner, engine.info, noted.take)) as loop:
            yield loop, noted

    def _handle(self, loop: EventLoop, prompts: np.ndarray, tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        for number, ids in enumerate(prompts):
            loop.handle(TokenizedGenerateReqInput(rid=f"r{number}", input_ids=ids, sampling_params=sampling))


@dataclass(frozen=True, slots=True)
class _Step:
    """at: when its tokens came. kv_tokens: that it read, over all requests."""

    at: float
    requests: int
    kv_tokens: int


class _Noted:
    """What a scheduler sends, step by step."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def take(self, output: SchedulerOutput) -> None:
        assert isinstance(output, BatchTokenOutput)
        failed = [
            one.finish_reason for one in output.outputs if one.finish_reason and one.finish_reason.type == "error"
        ]
        if failed:
            raise EngineError(failed[0].message)
        tokens = sum(one.prompt_tokens + one.completion_tokens - 1 for one in output.outputs)
        self._steps.append(_Step(time.perf_counter(), len(output.outputs), tokens))

    def steps_of(self, requests: int) -> Sequence[_Step]:
        return [step for step in self._steps if step.requests == requests]


def _greedy(tokens: int) -> SamplingOverrides:
    return SamplingOverrides(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)


def _run(loop: EventLoop) -> None:
    while not loop.is_idle():
        loop.step_or_wait()


def _prompt_steps(work: Work) -> int:
    """Steps that the prompts of the largest batch take, in which those who came first decode already."""
    return -(-max(work.batches) * work.context // work.prompt) + 1
