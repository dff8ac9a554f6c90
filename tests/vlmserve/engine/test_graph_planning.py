"""Captured steps take memory, which is found out before the KV cache is sized."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import vlmserve
from tests.fake_graphs import CallsAgain
from tests.tiny_checkpoints import HYBRID, make_checkpoint
from tests.vlmserve.executor.paged_backend import PagedBackend
from vlmserve import LLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import build
from vlmserve.engine.graph_planning import (
    GraphBuilder,
    GraphCost,
    GraphPlan,
    GraphTools,
    Pools,
    batch_sizes,
    plan_graphs,
    wanted_sizes,
)
from vlmserve.memory import sizing
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve.models.config import ExpertsConfig
from vlmserve.models.registry import load_model
from vlmserve_common.compute.shard import WHOLE, ExpertSharing, PipelineStage, Shard

FOLDER = Path(vlmserve.__file__).parent / "default_model"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXPERTS = ExpertsConfig(count=8, chosen=2, intermediate_size=16, sparse_layers=frozenset({1}))
MIB = 1 << 20


class Machine:
    """Has `free` bytes, of which a graph takes `each`, and the first 10 MiB more; `most` graphs can be captured."""

    def __init__(self, *, each: int = 20 * MIB, most: int = 100) -> None:
        self.total, self.each, self.most = 1000 * MIB, each, most
        self.error: Exception = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB")
        self.capturers: list[Machine._Capturer] = []
        self.live: weakref.WeakSet = weakref.WeakSet()

    class _Capturer(CallsAgain):
        def __init__(self, machine: Machine) -> None:
            super().__init__()
            self.machine, self.graphs = machine, 0

        def capture(self, run: Callable[[], None]) -> object:
            if self.graphs == self.machine.most:
                raise self.machine.error
            self.graphs += 1
            graph = super().capture(run)
            self.machine.live.add(graph)
            return graph

    def new_capturer(self) -> Machine._Capturer:
        self.capturers.append(self._Capturer(self))
        return self.capturers[-1]

    def free(self) -> int:
        return self.total - (10 * MIB * bool(self.live) + len(self.live) * self.each)

    @property
    def tools(self) -> GraphTools:
        return GraphTools(new_capturer=self.new_capturer, free=self.free)


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def new_cache(model) -> Callable[..., KVCache]:
    config = model.config
    heads = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return partial(KVCache, num_layers=config.num_layers, **heads, dtype=torch.float32, device=CPU)


def made(model, new_cache, machine: Machine, sizes: tuple[int, ...], room: int = 500 * MIB):
    builder = GraphBuilder(model=model, attn_backend=PagedBackend(), tools=machine.tools)
    plan = builder.plan(sizes, Pools(new_cache(num_slots=16), ReqToTokenPool(0, 32, CPU)), room=room)
    return plan, builder.capture(plan, Pools(new_cache(num_slots=64), ReqToTokenPool(sizes[-1], 32, CPU)))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Other tests may have had more logged than warnings."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_the_trial_shows_is_kept_free(model, new_cache, caplog) -> None:
    machine = Machine()
    with caplog.at_level(logging.INFO):
        plan, graphs = made(model, new_cache, machine, (1, 2, 4, 8))
    assert plan == GraphPlan(sizes=(1, 2, 4, 8), reserved=90 * MIB)
    assert graphs.sizes == (1, 2, 4, 8)
    assert [capturer.graphs for capturer in machine.capturers] == [2, 4]
    assert "captured decode steps of 1, 2, 4, 8 requests (4 CUDA graphs) in" in caplog.text
    assert caplog.text.rstrip().endswith("they take 90 MiB")


def test_little_memory_means_fewer_sizes_or_none(model, new_cache, caplog) -> None:
    plan, graphs = made(model, new_cache, Machine(), (1, 2, 4, 8), room=60 * MIB)
    assert (plan.sizes, plan.reserved, graphs.sizes) == ((1, 2), 50 * MIB, (1, 2))
    [line] = warnings_of(caplog)
    assert line.startswith("capturing decode steps of 1, 2, 4, 8 requests takes 90 MiB, and there is room for 60 MiB: ")
    assert "only those of 1, 2 are captured (settings: --cuda-graph-bs" in line
    caplog.clear()
    plan, graphs = made(model, new_cache, Machine(), (1, 2, 4, 8), room=20 * MIB)
    assert (plan, graphs) == (GraphPlan(), None)
    [line] = warnings_of(caplog)
    assert "none is captured" in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB"), "CUDA out of memory."),
        (Exception("out of resource: shared memory\nmore"), "out of resource: shared memory"),  # Triton's
    ],
    ids=["memory", "compiler"],
)
def test_a_trial_that_fails(model, new_cache, caplog, error: Exception, line: str) -> None:
    machine = Machine(most=0)
    machine.error = error
    assert made(model, new_cache, machine, (1, 2)) == (GraphPlan(), None)
    assert warnings_of(caplog) == [f"decode steps of 1, 2 requests are not all captured as CUDA graphs: {line}"]


@pytest.mark.parametrize("each", [0, MIB])
def test_a_second_graph_that_seems_to_take_nothing(model, new_cache, each: int) -> None:
    plan, _ = made(model, new_cache, Machine(each=each), (1, 2, 4, 8))
    assert plan.reserved == 10 * MIB + each + 3 * 8 * MIB
    assert made(model, new_cache, Machine(each=each), (3,))[0].sizes == (3,)


def test_a_capture_that_fails_halfway(model, new_cache, caplog) -> None:
    plan, graphs = made(model, new_cache, Machine(most=3), (1, 2, 4, 8))
    assert plan.sizes == (1, 2, 4, 8)
    assert graphs.sizes == (2, 4, 8)
    assert len(warnings_of(caplog)) == 1


def test_more_than_was_kept_free_is_told(model, new_cache, caplog) -> None:
    machine = Machine()
    builder = GraphBuilder(model=model, attn_backend=PagedBackend(), tools=machine.tools)
    pools = Pools(new_cache(num_slots=64), ReqToTokenPool(2, 32, CPU))
    builder.capture(GraphPlan(sizes=(1, 2), reserved=40 * MIB), pools)
    [line] = warnings_of(caplog)
    assert line.startswith("the CUDA graphs take 50 MiB, and 40 MiB were kept free")


def test_the_rank_with_the_least_room_decides_for_all(caplog) -> None:
    cost, asked = GraphCost(first=100 * MIB, more=10 * MIB), []

    def smallest(number: int) -> int:
        asked.append(number)
        return min(number, 2)

    assert plan_graphs((1, 2, 4, 8), cost, 1000 * MIB, smallest) == GraphPlan(sizes=(1, 2), reserved=110 * MIB)
    assert asked == [4]
    [line] = warnings_of(caplog)
    assert "room for 1000 MiB here, and for less at another rank: only those of 1, 2 are captured" in line


def test_where_nothing_is_captured(caplog) -> None:
    args = EngineArgs(model="m", max_running_requests=4)
    with caplog.at_level(logging.INFO):
        assert wanted_sizes(args, PagedBackend(), CPU, EXPERTS, WHOLE) == ()
        assert caplog.messages == []
        assert wanted_sizes(args, PagedBackend(), CUDA, EXPERTS, WHOLE) == (1, 2, 4)
        assert wanted_sizes(args, PagedBackend(), CUDA, EXPERTS, Shard(1, 2)) == (1, 2, 4)
        sending = Shard(1, 2, experts=ExpertSharing(ep_size=2, a2a="torch"))
        assert wanted_sizes(args, PagedBackend(), CUDA, None, sending) == (1, 2, 4)
        assert caplog.messages == []
        assert wanted_sizes(args, TorchAttentionBackend(), CUDA, None, WHOLE) == ()
        off = EngineArgs(model="m", disable_cuda_graph=True)
        assert wanted_sizes(off, PagedBackend(), CUDA, None, WHOLE) == ()
        assert wanted_sizes(args, PagedBackend(), CUDA, None, Shard(stage=PipelineStage(1, 2))) == ()
        assert wanted_sizes(args, PagedBackend(), CUDA, None, Shard(1, 2, groups=2)) == (1, 2, 4)
        assert wanted_sizes(args, PagedBackend(), CUDA, EXPERTS, sending) == ()
    assert caplog.messages == [
        "decode steps are not captured as CUDA graphs: TorchAttentionBackend reads the table on the host "
        "(--attention-backend)",
        "decode steps are not captured as CUDA graphs: --disable-cuda-graph",
        "decode steps are not captured as CUDA graphs: stages hand on rows behind each of them (--pp-size)",
        "decode steps are not captured as CUDA graphs: ranks are told in their midst how many rows come to their "
        "experts (--moe-a2a-backend)",
    ]


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_memory", lambda device: (1000 * MIB, 2000 * MIB))

    def room(**settings: object) -> int:
        activations = sizing.Activations(tower=100 * MIB, step=150 * MIB, logits=50 * MIB)
        args = EngineArgs(model="m", **settings)
        return sizing.graph_room(args, bytes_per_token=MIB, device=CUDA, activations=activations)

    assert room() == 80 * MIB
    assert room(max_total_tokens=95) == 80 * MIB
    assert room(max_total_tokens=722) == 40 * MIB
    assert room(max_total_tokens=900) == 0


def test_reserved_memory_is_not_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizing.Activations(tower=5, step=3, logits=1, graphs=2).peak == 7
    shown = str(sizing.Activations(tower=MIB, graphs=2 * MIB))
    assert shown == "3 MiB (vision tower 1 MiB, prompt chunk 0 MiB, logits 0 MiB, CUDA graphs 2 MiB)"


@pytest.mark.parametrize("family", ["built in", HYBRID])
def test_an_engine_has_its_graphs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the GPU."""
    folder = make_checkpoint(HYBRID, tmp_path) if family == HYBRID else FOLDER
    machine = Machine()
    monkeypatch.setattr(build, "wanted_sizes", lambda *about: (1, 2))
    monkeypatch.setattr(build, "cuda_tools", lambda device: machine.tools)
    monkeypatch.setattr(build, "choose_backend", lambda *args, **kwargs: PagedBackend())
    with LLM(folder, num_threads=1, cpu_kernels="off", max_running_requests=2, max_total_tokens=256) as llm:
        text = llm.chat("What is this?", max_tokens=6, temperature=0.0, ignore_eos=True).text
        assert machine.capturers[-1].replayed == 5
    monkeypatch.undo()
    with LLM(folder, num_threads=1, cpu_kernels="off") as plain:
        assert plain.chat("What is this?", max_tokens=6, temperature=0.0, ignore_eos=True).text == text


def test_usual_sizes() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(5) == (1, 2, 4, 5)
    assert batch_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert batch_sizes(100)[-4:] == (64, 80, 96, 100)
    assert batch_sizes(512)[-3:] == (448, 480, 512)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (1, 2, 4, 8, 10)),
        ({"max_running_requests": 4096}, batch_sizes(256)),
        ({"max_running_requests": 4096, "cuda_graph_max_bs": 600}, batch_sizes(600)),
        ({"cuda_graph_bs": "8, 3,1,64"}, (1, 3, 8, 10)),
        ({"cuda_graph_bs": "1,64,300", "max_running_requests": 512}, (1, 64, 300)),
        ({"cuda_graph_bs": "1,64,128", "max_running_requests": 512, "cuda_graph_max_bs": 100}, (1, 64, 100)),
    ],
    ids=str,
)
def test_chosen(settings: dict, sizes: tuple[int, ...]) -> None:
    args = EngineArgs(model="m", **{"max_running_requests": 10, **settings})
    assert wanted_sizes(args, PagedBackend(), CUDA, None, WHOLE) == sizes


@pytest.mark.parametrize(("room", "sizes"), [(130, (1, 2, 4, 8)), (129, (1, 2, 4)), (100, (1,)), (99, ()), (-5, ())])
def test_what_memory_affords(room: int, sizes: tuple[int, ...]) -> None:
    assert plan_graphs((1, 2, 4, 8), GraphCost(first=100, more=10), room).sizes == sizes
