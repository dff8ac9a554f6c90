"""What computing takes: the estimate against what a profiler saw, and what limits the largest step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import vlmserve
from tests.tiny_checkpoints import HYBRID, STREAMED, make_checkpoint
from vlmserve import LLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import activation_memory, build, encoder
from vlmserve.engine.activation_memory import (
    StepLimits,
    encoder_bytes,
    estimate_activations,
    measure_activations,
    step_limits,
)
from vlmserve.engine.rank_processes import rank_shard
from vlmserve.memory import sizing
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve.models.registry import load_model, outline_model
from vlmserve_common.compute.communicator import Communicator

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


@pytest.mark.parametrize("family", [HYBRID, STREAMED])
@pytest.mark.parametrize("stage", [0, 1])
def test_each_stage_of_a_pipeline_is_measured(family, stage, tmp_path):
    folder = make_checkpoint(family, tmp_path / "model", mtp=True, mixers=("linear_attention", "full_attention") * 2)
    shard = rank_shard(EngineArgs(model=str(folder), pp_size=2), stage)
    model = load_model(folder, comm=Communicator(shard), mtp=True)
    limits = StepLimits(tokens=100, rows=2, patches=0)
    assert measure_activations(model, TorchAttentionBackend(), limits, peak).step


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


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"encoder_dp_size": 2}, [0, 0]),  # behind the ranks
        ({"encoder_dp_size": 3}, [1, 0]),  # and then from the first GPU on
        ({"encoder_devices": "cuda:1,cuda:1,cuda:3"}, [0, 2]),
        ({"encoder_devices": "cuda", "encoder_dp_size": 2}, [2, 0]),
        ({"mm_encoder_tp_mode": "data"}, [1, 1]),
        ({"mm_encoder_tp_mode": "data", "nnodes": 2, "tp_size": 4}, [1, 1, 0, 0]),
        ({"encoder_devices": "cpu", "encoder_dp_size": 2}, [0, 0]),
        ({"tp_size": 1, "pp_size": 2, "encoder_devices": "cuda:1"}, [0, 1]),
        ({}, [0, 0]),
    ],
)
def test_encoder_processes_have_memory_on_the_gpu_of_a_rank(settings, counts, monkeypatch: pytest.MonkeyPatch):
    """Weights, a batch, and CUDA itself: for each that will be there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(encoder, "resolve_device", lambda name, *_: torch.device("cuda:0" if name == "cuda" else name))
    args = EngineArgs(model=str(FOLDER), **{"tp_size": 2} | settings)
    model = outline_model(FOLDER, torch.float32)
    batch = StepLimits(tokens=1, rows=1, patches=65536)
    each = weight_bytes(model.visual) + estimate_activations(model, batch).tower + 2**30
    for rank, count in enumerate(counts):
        own = replace(args, node_rank=rank // (len(counts) // args.nnodes))
        device = torch.device("cuda", rank - own.own_ranks.start)
        found = encoder_bytes(own, device, model.towers, model.dtype, rank_shard(own, rank))
        assert found == count * each
    assert encoder_bytes(args, CPU, model.towers, model.dtype, rank_shard(args, 0)) == 0


def test_slots_leave_room_for_encoder_processes_that_start_later(monkeypatch: pytest.MonkeyPatch):
    each, slots = 20 * 2**20, []
    for module in (sizing, build):
        monkeypatch.setattr(module, "free_memory", lambda device: (2**28, 2**28))
    for count in (0, 2):
        monkeypatch.setattr(build, "encoder_bytes", lambda *_, count=count: count * each)
        with LLM(num_threads=1, media_processes=0, mem_fraction_static=0.95, encoder_cache_mib=8) as llm:
            kv = llm._runner.kv_cache.layers
            slots.append(llm.info.max_total_tokens)
    a_slot = sum(part[0].nbytes for layer in kv for part in (layer.keys, layer.values))
    assert (slots[0] - slots[1]) * a_slot == pytest.approx(0.95 * 2 * each, rel=0.01)


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
