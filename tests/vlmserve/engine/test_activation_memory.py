"""What computing takes: the estimate against what a profiler saw, and what limits the largest step."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import vlmserve
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import activation_memory
from vlmserve.engine.activation_memory import StepLimits, estimate_activations, measure_activations, step_limits
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve.models.registry import load_model, outline_model

FOLDER = Path(vlmserve.__file__).parent / "default_model"
CPU = torch.device("cpu")


def peak(run: Callable[[], object]) -> int:
    """A meter of the CPU's memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_estimate_is_enough_and_not_far_off(dtype):
    limits = StepLimits(tokens=400, rows=32, patches=784)
    estimated = estimate_activations(outline_model(FOLDER, dtype), limits)
    measured = measure_activations(load_model(FOLDER, dtype=dtype), TorchAttentionBackend(), limits, peak)
    for name in ("tower", "step", "logits"):
        ratio = getattr(estimated, name) / getattr(measured, name)
        assert 0.9 < ratio < 2.5, (name, ratio)
    without = estimate_activations(outline_model(FOLDER, dtype), StepLimits(tokens=400, rows=32, patches=0))
    assert (without.tower, without.step) == (0, estimated.step)


def limits(auto_pixels: int | None = None, context: int = 4096, **settings: object) -> StepLimits:
    args = EngineArgs(model=str(FOLDER), max_running_requests=8, **settings)
    return step_limits(args, CPU, max_model_len=context, auto_pixels=auto_pixels)


def test_limits_of_a_step():
    assert limits(chunked_prefill_size=512).tokens == 512 + 8
    assert limits(chunked_prefill_size=512, max_prefill_tokens=256).tokens == 256 + 8
    assert limits(chunked_prefill_size=-1, max_prefill_tokens=256).tokens == 4096 + 8
    assert limits(chunked_prefill_size=-1, context=16).tokens == 8 * 16 + 8
    assert limits().rows == 8
    patch = 16 * 16
    assert limits(max_pixels=144 * patch).patches == 1024  # a batch
    assert limits(max_pixels=144 * patch, encoder_max_patches=100).patches == 144  # a picture
    assert limits(auto_pixels=169 * patch, encoder_max_patches=100).patches == 169
    assert limits(encoder_dp_size=1).patches == 0


def test_a_gpus_meter(monkeypatch):
    calls = []
    fake = SimpleNamespace(
        synchronize=lambda device: calls.append("wait"),
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        memory_allocated=lambda device: 100,
        max_memory_allocated=lambda device: 170,
        empty_cache=lambda: calls.append("empty"),
    )
    monkeypatch.setattr(activation_memory.torch, "cuda", fake)
    assert activation_memory.cuda_meter(torch.device("cuda:0"))(lambda: calls.append("run")) == 70
    assert calls == ["wait", "reset", "run", "wait", "empty"]
