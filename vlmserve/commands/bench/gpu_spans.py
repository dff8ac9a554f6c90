"""How long the device was at each step: from its first kernel to its last, by events on the stream it computes on.

Between the spans of two steps the device waits for the host. A stream that is behind has its events late, too, so a
host that is ahead shows as spans that follow each other at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, SamplingBatchInfo


class _Mark(Protocol):
    """A place in the device's work."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds until another one."""
        ...


class _Now:
    """Where work is done at once."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, later: _Now) -> float:
        return (later._at - self._at) * 1e3


def _event() -> _Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class _Span:
    requests: int
    began: _Mark
    ended: _Mark | None = None


class StepSpans(AbstractContextManager["StepSpans"]):
    """Notes every step that a runner computes while it is entered."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._forward, self._sample = runner.forward, runner.sample
        self._spans: list[_Span] = []
        self._mark: Callable[[], _Mark] = _event if runner.device.type == "cuda" else _Now

    def __enter__(self) -> StepSpans:
        def forward(batch: ModelWorkerBatch, together: Sequence[ModelWorkerBatch] = ()) -> Any:
            self._spans.append(_Span(len(batch.seq_lens), self._mark()))
            return self._forward(batch, together)

        def sample(forwarded: Any, info: SamplingBatchInfo, logits: Any = None) -> Any:
            result = self._sample(forwarded, info, logits)
            self._spans[-1].ended = self._mark()
            return result

        self._runner.forward = forward  # type: ignore[method-assign]
        self._runner.sample = sample  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._runner.forward, self._runner.sample

    def of(self, requests: int) -> tuple[float, ...]:
        """Seconds of each step of so many requests. Waits for the device."""
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        return tuple(
            span.began.elapsed_time(span.ended) / 1e3
            for span in self._spans
            if span.requests == requests and span.ended is not None
        )
