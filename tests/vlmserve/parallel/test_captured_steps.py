"""Ranks that share a model capture the same decode steps, and replay them together: as on GPUs, but for the GPUs."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_graphs import Recorder
from tests.recordable_group import make_recordable_groups
from tests.tiny_checkpoints import HYBRID, MOE, make_checkpoint
from tests.vlmserve.executor.paged_backend import PagedBackend
from tests.vlmserve.parallel.sharing import GREEDY, LAYERS, SETTINGS
from tests.vlmserve.reference import conversations
from vlmserve import LLM
from vlmserve.commands.offline import llm as offline
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import build, rank_processes
from vlmserve.engine.build import EngineInfo
from vlmserve.engine.graph_planning import GraphTools
from vlmserve.engine.warm_up import warm_up
from vlmserve.executor.cuda_graphs import DecodeGraphs
from vlmserve.executor.distributed.group_part import GroupPart
from vlmserve.executor.distributed.orders import SampleOrder
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import PendingResult
from vlmserve.models.attention.base import ForwardBatch, ForwardMode
from vlmserve_common.compute.experts import Experts, SparseMLP
from vlmserve_common.compute.graphs import Graph
from vlmserve_common.errors import RankLostError
from vlmserve_common.parallel.meeting import MeetingPlace
from vlmserve_common.parallel.ranks import Ranks

OURS = {**SETTINGS, "cpu_kernels": "off", "max_running_requests": 4}
SIZES = (1, 2, 4)
ROOM = 1 << 30


class RankThreads:
    """Stands for `RankProcesses`: all ranks but the first are threads."""

    def __init__(self, args: EngineArgs, place: MeetingPlace, log_level: str) -> None:
        self._errors: list[Exception] = []
        self._ready = [threading.Event() for _ in range(1, args.world_size)]
        self._threads = [
            threading.Thread(target=self._follow, args=(args, rank, place), name=f"rank-{rank}", daemon=True)
            for rank in range(1, args.world_size)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, args: EngineArgs, rank: int, place: MeetingPlace) -> None:
        try:
            rank_processes.follow(args, rank, place, ready=self._ready[rank - 1].set)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # lets go of the connections, as the end of a process does
            self._errors.append(error)

    def check(self, timeout_s: float = 0.0) -> None:
        assert not self._errors, self._errors

    def wait_ready(self) -> None:
        assert all(ready.wait(60) for ready in self._ready)

    def who_died(self, timeout_s: float = 0.0) -> str | None:
        return str(self._errors[0]) if self._errors else None

    def stop(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert len(self._errors) == len(self._threads)
        assert all(isinstance(error, RankLostError) for error in self._errors)


def rank_here() -> int:
    """Of this thread."""
    name = threading.current_thread().name
    return int(name.removeprefix("rank-")) if name.startswith("rank-") else 0


class RankRecorder(Recorder):
    """Of one rank."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.of_follower = rank_here() > 0
        self._gpu = gpu

    def capture(self, run: Callable[[], None]) -> Graph:
        if self.of_follower:
            self._gpu.good -= 1
            if self._gpu.good < 0:
                for _ in range(2):  # the other one is in the midst of it
                    run()
                raise RuntimeError("no more graphs\nhere")
        return super().capture(run)


class Gpu:
    """What an engine takes for one. good: captures that go well at the second rank. recorders: of both."""

    def __init__(self) -> None:
        self.recorders: list[RankRecorder] = []
        self.good = 100

    def tools(self, device: torch.device) -> GraphTools:
        def new() -> RankRecorder:
            self.recorders.append(RankRecorder(self))
            return self.recorders[-1]

        return GraphTools(new_capturer=new, free=lambda: ROOM)

    def replayed(self, *, by_follower: bool) -> int:
        return sum(one.replayed for one in self.recorders if one.of_follower == by_follower)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(build, "wanted_sizes", lambda *about: SIZES)
    monkeypatch.setattr(build, "cuda_tools", made.tools)
    monkeypatch.setattr(build, "choose_backend", lambda *args, **kwargs: PagedBackend())
    monkeypatch.setattr(rank_processes, "RankProcesses", RankThreads)
    monkeypatch.setattr(rank_processes, "LAST_WORDS_S", 0.0)
    monkeypatch.setattr(Experts, "_one_by_one", every_expert)
    make_recordable_groups(monkeypatch)
    return made


def every_expert(
    self: Experts, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, workspace: object
) -> torch.Tensor:
    """As on a GPU nothing depends on which experts are hit, but for the numbers."""
    total = torch.zeros(x.shape)
    for slot in range(len(self.part.own)):
        gate_up, down = (self._weight_of(index, slot, x.dtype) for index in range(2))
        gates, rest = (x @ gate_up.t()).chunk(2, dim=-1)
        total += ((self.act(gates) * rest) @ down.t()) * (scores * (ids == slot)).sum(1, keepdim=True)
    return total


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(done.token_ids) for done in llm.chat_batch(conversations(), GREEDY)]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3_vl", {}, marks=pytest.mark.slow),
        pytest.param(HYBRID, {}, marks=pytest.mark.slow),
        (MOE, {"ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4, "eplb_rebalance_num_iterations": 5}),
    ],
)
def test_the_same_answers_as_alone(family: str, settings: dict, tmp_path: Path, gpu: Gpu):
    folder = str(make_checkpoint(family, tmp_path / "model"))
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(build, "wanted_sizes", lambda *about: ())
        with LLM(folder, **OURS) as llm:
            wanted = answers(llm)
    with LLM(folder, tp_size=2, **settings, **OURS) as llm:
        group = llm.engine.ranks.group
        before = group.counts["all_reduce"]
        assert answers(llm) == wanted
        replayed = gpu.replayed(by_follower=False)
        assert gpu.replayed(by_follower=True) == replayed > GREEDY.max_new_tokens
        stats = llm.stats()
        sums = stats.forward_steps_total * (2 * LAYERS + 1)
        assert group.counts["all_reduce"] - before == sums + stats.experts.rebalances_total
        if settings:
            assert stats.experts.rebalances_total > 3
            first = next(mlp for mlp in llm._runner.model.modules() if isinstance(mlp, SparseMLP))
            assert first.slots.placement != tuple(slot % 8 for slot in range(12))


def test_only_who_has_the_logits_samples_to_warm_up(tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    sampling: list[str] = []
    sample = ModelRunner.sample

    def counted(runner: ModelRunner, *args: Any) -> PendingResult:
        sampling.append(threading.current_thread().name)
        return sample(runner, *args)

    def warmed_up(args: EngineArgs, ranks: Ranks | None = None) -> tuple[ModelRunner, EngineInfo]:
        runner, info = build.build_runner(args, ranks)
        warm_up(runner, with_tower=False)
        return runner, info

    monkeypatch.setattr(ModelRunner, "sample", counted)
    monkeypatch.setattr(rank_processes, "build_runner", warmed_up)
    monkeypatch.setattr(offline, "build_runner", warmed_up)
    folder = str(make_checkpoint("qwen3_vl", tmp_path / "model"))
    with LLM(folder, tp_size=2, **OURS) as llm:
        assert len(sampling) > 10
        assert "rank-1" not in sampling
        assert len(answers(llm)) == len(conversations())


@pytest.mark.parametrize(
    ("good", "sizes"), [(4, (2, 4)), *(pytest.param(few, (), marks=pytest.mark.slow) for few in (2, 0))]
)
def test_what_one_rank_cannot_capture_none_has(
    good: int, sizes: tuple[int, ...], tmp_path: Path, gpu: Gpu, caplog: pytest.LogCaptureFixture
):
    """Two are captured for a trial, and then all of them, the largest first."""
    gpu.good = good
    folder = str(make_checkpoint("qwen3_vl", tmp_path / "model"))
    with caplog.at_level(logging.WARNING), LLM(folder, tp_size=2, **OURS) as llm:
        graphs = llm._runner._graphs
        assert (() if graphs is None else graphs.sizes) == sizes
        assert len(answers(llm)) == len(conversations())
    start = "decode steps of 1, 2, 4 requests are not all captured as CUDA graphs: "
    assert {start + "no more graphs", start + "another rank could not"} <= set(caplog.messages)


class Replays:
    """Of each rank, in order: the captured size, and how many requests the rank has of its own. launched: requests of
    steps that decode and were not replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_rank: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.launched: list[int] = []
        run, join, launch = DecodeGraphs.run, DecodeGraphs.join, ModelRunner._run

        def noted_run(graphs: DecodeGraphs, forward_batch: ForwardBatch, size: int) -> torch.Tensor:
            self.of_rank[rank_here()].append((size, len(forward_batch.extend_lens)))
            return run(graphs, forward_batch, size)

        def noted_join(graphs: DecodeGraphs, size: int) -> None:
            self.of_rank[rank_here()].append((size, 0))
            join(graphs, size)

        def noted_launch(runner: ModelRunner, forward_batch: ForwardBatch, *embeds: Any) -> torch.Tensor:
            if forward_batch.forward_mode == ForwardMode.DECODE:
                self.launched.append(len(forward_batch.extend_lens))
            return launch(runner, forward_batch, *embeds)

        monkeypatch.setattr(ModelRunner, "_run", noted_launch)
        monkeypatch.setattr(DecodeGraphs, "run", noted_run)
        monkeypatch.setattr(DecodeGraphs, "join", noted_join)


@torch.inference_mode()
def overwritten_first(part: GroupPart, steps: Sequence[SampleOrder | None]) -> Iterator[torch.Tensor]:
    """As if the others had replayed once more before any step is sampled."""
    graphs = part._runner._graphs
    assert graphs is not None
    graphs.hidden.fill_(torch.nan)
    return sampled_logits(part, steps)


sampled_logits = GroupPart.logits
TWO_GROUPS = {"dp_size": 2, "enable_dp_attention": True}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_vl", {"tp_size": 2}),
        pytest.param("qwen3_vl", {"tp_size": 4}, marks=pytest.mark.slow),
        pytest.param(HYBRID, {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param(MOE, {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "none"}, marks=pytest.mark.slow),
    ],
)
def test_groups_replay_together(family: str, settings: dict, tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """More than was captured at a time, then more in one group than in the other, and none in the other."""
    folder, asked = str(make_checkpoint(family, tmp_path / "model")), conversations()
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(build, "wanted_sizes", lambda *about: ())
        with LLM(folder, **OURS) as llm:
            wanted = answers(llm)
    monkeypatch.setattr(build, "wanted_sizes", lambda *about: (1, 2))
    monkeypatch.setattr(GroupPart, "logits", overwritten_first)
    replays = Replays(monkeypatch)
    with LLM(folder, **settings, **TWO_GROUPS, **OURS) as llm:
        assert answers(llm) == wanted
        assert max(replays.launched) > 2
        replays.of_rank.clear()
        few = llm.chat_batch(asked[:3], GREEDY)
        assert [tuple(done.token_ids) for done in few] == wanted[:3]
        ranks = [replays.of_rank.pop(rank) for rank in range(settings["tp_size"])]
        sizes = [[size for size, _ in replayed] for replayed in ranks]
        assert all(found == sizes[0] for found in sizes)
        own = [sorted((one, other)) for (_, one), (_, other) in zip(ranks[0], ranks[-1], strict=True)]
        assert [1, 2] in own

        peers = llm.engine.ranks.computing[-1]
        before = Counter(peers.counts)
        assert tuple(llm.chat(asked[3], GREEDY).token_ids) == wanted[3]
        ranks = [replays.of_rank[rank] for rank in range(settings["tp_size"])]
        assert sorted((ranks[0], ranks[-1])) == [[(1, 0)] * 7, [(1, 1)] * 7]
        for name in ("all_gather", "reduce_scatter"):  # not of prompts, of which one group has all
            assert peers.counts[name] - before[name] == 7 * (1 + LAYERS)
