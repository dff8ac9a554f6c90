"""A run of `vlmserve bench gpu`: the time that is left, what the device reaches, and both models, each made once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from vlmserve.commands.bench.gpu.engine import DecodeSteps, MeasuredEngine
from vlmserve.commands.bench.gpu.shapes import GpuLoad
from vlmserve.commands.bench.reference import Reference, share_weights
from vlmserve.commands.bench.vision_subject import finish
from vlmserve.models.random_weights import random_model
from vlmserve.models.vlm import VisionLanguageModel

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
