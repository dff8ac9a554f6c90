"""The launches and copies of a decode step on a GPU, counted on a CPU.

The model computes as on a GPU, with our kernels under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmserve.commands.bench.gpu.shapes import SHAPES, TEXT_IDS, small, write_folder
from vlmserve.commands.offline.llm import LLM
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.ipc.messages import SamplingParams, TokenizedGenerateReqInput
from vlmserve_common.errors import EngineError

_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"}
_NO_LAUNCH |= {"alias", "lift_fresh", "_reshape_alias"}
_STEPS = 3
_SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "cpu_kernels": "off",
    "attention_backend": "triton",
    "gpu_kernels": "triton",
    "num_threads": 1,
    "max_total_tokens": 256,
    "max_model_len": 64,
    "disable_radix_cache": True,
}


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """The launches of one decode step by name, and the bytes of each copy to the device (up) and back (down)."""

    launches: Counter[str] = field(default_factory=Counter)
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)


def count_decode(
    folder: Path, *, requests: int, sampling: SamplingParams | None = None
) -> tuple[StepCounts, Counter[str]]:
    """Count a step in which `requests` requests decode, greedily by default. Returns its counts without launches of
    layers, and the launches of a layer of Qwen3-VL: the difference between models of three and of two.

    folder: for their settings. Raises EngineError if Triton's interpreter is not on.
    """
    greedy = SamplingParams(temperature=0.0)
    two, three = (_count(folder / str(layers), layers, requests, sampling or greedy) for layers in (2, 3))
    layer = three.launches - two.launches
    two.launches.subtract(Counter({name: 2 * count for name, count in layer.items()}))
    return replace(two, launches=+two.launches), layer


def _count(folder: Path, layers: int, requests: int, sampling: SamplingParams) -> StepCounts:
    shape = small(SHAPES["8b"])
    write_folder(folder, replace(shape, text=dict(shape.text) | {"num_hidden_layers": layers}))
    random, limited = np.random.default_rng(0), replace(sampling, max_new_tokens=_STEPS, ignore_eos=True)
    with LLM(str(folder), **_SETTINGS, max_running_requests=max(2, requests)) as llm:
        loop = llm.engine.loop
        with _decode_steps(llm.engine.runner, requests) as found:
            for number in range(requests):
                ids = random.integers(0, TEXT_IDS, 3)
                loop.handle(TokenizedGenerateReqInput(rid=f"r{number}", input_ids=ids, sampling_params=limited))
            while not loop.is_idle():
                loop.step_or_wait()
    if not found:
        raise EngineError(f"no step decoded {requests} requests at a time")
    return found[-1]


@contextmanager
def _decode_steps(runner: ModelRunner, requests: int) -> Iterator[list[StepCounts]]:
    """Yield a list that grows by the counts of each step that decodes `requests` requests."""
    found: list[StepCounts] = []
    transfers, forward, sample = runner._transfers, runner.forward, runner.sample
    decodes = False

    def counted(run: Callable[..., Any], *args: Any) -> Any:
        with launches() as names:
            result = run(*args)
        found[-1].launches.update(names)
        return result

    def noting(run: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        def copy(arrays: Any) -> Any:
            if decodes:
                getattr(found[-1], name).append(sum(array.nbytes for array in arrays))
            return run(arrays)

        return copy

    def counting_forward(batch: Any) -> Any:
        nonlocal decodes
        decodes = len(batch.input_ids) == len(batch.seq_lens) == requests
        if decodes:
            found.append(StepCounts())
        return counted(forward, batch) if decodes else forward(batch)

    def counting_sample(forwarded: Any, info: Any) -> Any:
        return counted(sample, forwarded, info) if decodes else sample(forwarded, info)

    with (
        mock.patch.object(runner, "forward", counting_forward),
        mock.patch.object(runner, "sample", counting_sample),
        mock.patch.object(transfers, "upload", noting(transfers.upload, "up")),
        mock.patch.object(transfers, "download", noting(transfers.download, "down")),
    ):
        yield found


@contextmanager
def launches() -> Iterator[list[str]]:
    """Yield a list that grows by the names of the operators and kernels that would be launched on a GPU.

    An operator of torch that computes something is one launch (a few are more on a GPU), and so is a kernel of
    Triton, also under its interpreter.
    """
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    from vlmserve_common.kernels.gpu.common import INTERPRETED

    launched: list[str] = []
    operators = _Operators(launched)
    owner, name = (GridExecutor, "__call__") if INTERPRETED else (JITFunction, "run")
    plain = getattr(owner, name)

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append((kernel.fn if INTERPRETED else kernel).__name__)
        operators.inside_a_kernel = True
        try:
            return plain(kernel, *args, **kwargs)
        finally:
            operators.inside_a_kernel = False

    with mock.patch.object(owner, name, counted), operators:
        yield launched


class _Operators(TorchDispatchMode):
    """Notes torch's operators, but not those of the interpreter inside a kernel."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched
        self.inside_a_kernel = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not (self.inside_a_kernel or name in _NO_LAUNCH or (function.is_view and _shares_memory(out, args))):
            self._launched.append(name)
        return out


def _shares_memory(out: Any, args: Any) -> bool:
    """Return True if an operator that may return the memory of its input (`to`, `reshape`) did."""
    first = next((one for one in tree_leaves(out) if isinstance(one, torch.Tensor)), None)
    given = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
    return first is None or first.untyped_storage().data_ptr() in given
