"""What a decode step asks of a GPU, counted on a CPU: launches, and copies between host and device.

The model computes as on a GPU, with our kernels under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from vlmserve.commands.bench.gpu_shapes import SHAPES, TEXT_IDS, Shape, small, write_folder
from vlmserve.commands.bench.launches import launches
from vlmserve.commands.offline.llm import LLM
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, SamplingBatchInfo
from vlmserve.ipc.messages import SamplingParams, TokenizedGenerateReqInput
from vlmserve_common.errors import EngineError

_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Of one decode step: launches by name, copies to the device and back, and the bytes of these."""

    launches: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    """A step's counts, taken apart: launches of each layer, and those of the step beside its layers."""

    layer: Counter[str]
    beside: Counter[str]
    step: StepCounts


def count_decode(folder: Path, *, requests: int, sampling: SamplingParams | None = None) -> LayerCounts:
    """Of a step in which so many requests decode (greedily unless `sampling` says otherwise), with Qwen3-VL's layers.

    Of models of two and of three layers: what differs is a layer's. folder: for their settings. EngineError where
    Triton's interpreter is not on.
    """
    shape = small(SHAPES["8b"])
    two, three = (_count(folder / str(layers), shape, layers, requests, sampling) for layers in (2, 3))
    layer = three.launches - two.launches
    twice = Counter({name: 2 * count for name, count in layer.items()})
    return LayerCounts(layer=layer, beside=two.launches - twice, step=two)


def _count(folder: Path, shape: Shape, layers: int, requests: int, sampling: SamplingParams | None) -> StepCounts:
    text = dict(shape.text) | {"num_hidden_layers": layers}
    made = Shape(what=shape.what, family=shape.family, tied=shape.tied, text=text, vision=shape.vision)
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "cpu_kernels": "off",
        "attention_backend": "triton",
        "gpu_kernels": "triton",
        "num_threads": 1,
        "max_total_tokens": 256,
        "max_model_len": 64,
        "max_running_requests": max(2, requests),
        "disable_radix_cache": True,
    }
    sampling = sampling or SamplingParams(temperature=0.0)
    with LLM(str(write_folder(folder, made)), **settings) as llm:
        loop, runner = llm.engine.loop, llm.engine.runner
        random = np.random.default_rng(0)
        with _decode_steps(runner, requests) as found:
            for number in range(requests):
                ids = random.integers(0, TEXT_IDS, 3)
                limited = replace(sampling, max_new_tokens=_STEPS, ignore_eos=True)
                loop.handle(TokenizedGenerateReqInput(rid=f"r{number}", input_ids=ids, sampling_params=limited))
            while not loop.is_idle():
                loop.step_or_wait()
    if not found:
        raise EngineError(f"no step decoded {requests} requests at a time")
    return found[-1]


@contextmanager
def _decode_steps(runner: ModelRunner, requests: int) -> Iterator[list[StepCounts]]:
    """A list that grows by the counts of each step that decodes so many requests."""
    found: list[StepCounts] = []
    forward, sample = runner.forward, runner.sample
    counted: list[Counted] = []

    def counting_forward(batch: ModelWorkerBatch) -> Any:
        counted[:] = [Counted()] if len(batch.input_ids) == len(batch.seq_lens) == requests else []
        return counted[0].during(lambda: forward(batch), runner) if counted else forward(batch)

    def counting_sample(forwarded: Any, info: SamplingBatchInfo) -> Any:
        if not counted:
            return sample(forwarded, info)
        result = counted[0].during(lambda: sample(forwarded, info), runner)
        found.append(counted[0].counts())
        return result

    with (
        mock.patch.object(runner, "forward", counting_forward),
        mock.patch.object(runner, "sample", counting_sample),
    ):
        yield found


class Counted:
    """Counts while something runs."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self._up: list[int] = []
        self._down: list[int] = []

    def counts(self) -> StepCounts:
        """So far."""
        return StepCounts(
            launches=self.launches,
            uploads=len(self._up),
            upload_bytes=sum(self._up),
            downloads=len(self._down),
            download_bytes=sum(self._down),
        )

    def during(self, run: Callable[[], Any], runner: ModelRunner) -> Any:
        """run(), counted."""
        transfers = runner._transfers
        upload, download = transfers.upload, transfers.download

        def counting_upload(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
            self._up.append(sum(array.nbytes for array in arrays))
            return upload(arrays)

        def counting_download(tensors: Sequence[torch.Tensor]) -> Any:
            self._down.append(sum(tensor.nbytes for tensor in tensors))
            return download(tensors)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(transfers, "upload", counting_upload))
            stack.enter_context(mock.patch.object(transfers, "download", counting_download))
            stack.callback(self.launches.update, stack.enter_context(launches()))
            return run()
