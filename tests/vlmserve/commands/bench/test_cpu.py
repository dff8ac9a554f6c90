"""Benchmarks of a CPU: they run, compare like with like in turns, count what they say, and know who else is at work."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import hf_env  # noqa: F401  # noqa: F401
from vlmserve import cli
from vlmserve.commands.bench import api, parallel, processors, sched, vision
from vlmserve.commands.bench import processes as watching
from vlmserve.commands.bench.api import bodies, send_all
from vlmserve.commands.bench.fake_engine import STEP_VARIABLE
from vlmserve.commands.bench.figures import Measure, Spread, in_turns, ratios
from vlmserve.commands.bench.media import clip
from vlmserve.commands.bench.parallel import OTHERS, in_rounds
from vlmserve.commands.bench.processes import CpuWatch, server_pid
from vlmserve.commands.bench.reference import check_rows
from vlmserve.commands.bench.sched import SchedulerLoad, SchedulerSubject
from vlmserve.commands.bench.vision import TowerSubject, write_checkpoint
from vlmserve.commands.client.own_server import OwnServer
from vlmserve_common.errors import EngineError


@pytest.mark.slow
def test_figures_of_the_api(tmp_path):
    file = tmp_path / "api.json"
    words = ["--rounds", "1", "--requests", "3", "--streams", "4", "--tokens", "8", "--step-ms", "1"]
    assert api.main([*words, "--json", str(file)]) == 0
    measures = json.loads(file.read_text())["measures"]
    assert (len(measures["fake"]), len(measures["real"])) == (6, 3)
    figures = [one for made in measures.values() for one in made]
    assert all(one["spread"]["least"] > 0 for one in figures)
    assert [one["target"] for one in figures if one["met"] is not None] == [3.0, 3.0, 0.05, 200.0, 0.85]


def test_the_client_counts_events_and_tells_refusals():
    words = ["--served-model-name", "bench", "--log-level", "warning"]
    command = ("vlmserve.commands.bench.fake_engine",)
    with OwnServer(words, {STEP_VARIABLE: "20"}, command=command) as server:
        streamed = send_all(server.base_url, bodies(3, 5, stream=True), at_a_time=2)
        # a role first, five tokens, the end, and [DONE]; tokens may come together where the machine is busy
        assert 3 * 3 < streamed.events <= 3 * 8
        assert send_all(server.base_url, bodies(1, 5, stream=False), at_a_time=2).events == 0
        with pytest.raises(EngineError, match=r"404.*'other'"):
            send_all(server.base_url, [bodies(1, 1, stream=False)[0] | {"model": "other"}], at_a_time=1)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_the_load_is_kept_up(policy, depth):
    subject = SchedulerSubject(SchedulerLoad(running=8, waiting=30, policy=policy, depth=depth, clients=3))
    for _ in range(30):
        assert all(seconds >= 0 for seconds in subject.turns(30))
        here = len(subject.scheduler.waiting_queue) + len(subject.scheduler.waiting_queue.in_progress)
        assert abs(here + len(subject.scheduler.running_batch) + subject.ended - 38) <= 1
        assert len(subject.scheduler.running_batch) >= 6
    assert subject.scheduler.stats().finished_total > 10


def test_figures_of_the_scheduler(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert (
        sched.main(["--running", "16", "--waiting", "50", "--turns", "20", "--rounds", "2", "--json", str(file)]) == 0
    )
    shown = capsys.readouterr().out
    assert "lpm, page size 1, 2 in flight" in shown
    assert "target: at most 5 ms" in shown
    figures = json.loads(file.read_text())["measures"]
    assert set(figures) == {"policies", "radix"}
    assert all(one["spread"]["median"] >= 0 for part in figures.values() for one in part)
    assert {one["target"] for one in figures["radix"]} == {1.0}


FOUND = {
    OTHERS: [0.0, 0.1],
    "reads of one": [2.0, 2.0],
    "reads of two": [1.25, 1.25],  # the machine reads 1.6 times as quickly
    "decode of one": [1.0, 1.0],
    "decode of two": [0.5, 0.8],  # twice, and 1.25 times as quick
    "products of one": [2.0, 2.0],
    "products of two": [1.0, 1.0],
    "prefill of one": [1.0, 1.0],
    "prefill of two": [1.0, 1.0],
}


def test_what_is_gained_is_part_of_what_is_possible():
    found = {one.name: one for one in parallel._gains(FOUND, "two over one", target=0.8)}
    decode, prefill = found["decode, of what is possible"], found["prefill, of what is possible"]
    assert (decode.spread.least, decode.spread.most) == pytest.approx((1.25 / 1.6, 2 / 1.6))
    assert decode.met
    assert prefill.spread.median == pytest.approx(0.5)
    assert prefill.met is False


def test_the_first_of_all_rounds_warms_up():
    turns = iter(range(6))
    found = in_rounds({"a": lambda: next(turns), "b": lambda: next(turns)}, 2)
    assert len(found.pop(OTHERS)) == 2
    assert found == {"a": [2, 4], "b": [3, 5]}


@pytest.mark.slow
def test_figures_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(parallel.TEXT_SIZES, "vocab_size", 4096)
    file = tmp_path / "figures.json"
    work = ["--requests", "2", "--steps", "8", "--prompt", "32", "--rounds", "1", "--wait-s", "0"]
    assert parallel.main(["--parts", "tp", "pp", "--layers", "2", *work, "--json", str(file)]) == 0
    measures = json.loads(file.read_text())["measures"]
    for part, target in (("tp", 0.8), ("pp", 0.85)):
        figures = {one["name"]: one for one in measures[part]}
        for name in ("decode, of what is possible", "prefill, of what is possible"):
            assert figures[name]["target"] == target
            assert figures[name]["spread"]["least"] > 0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
def test_it_runs_beside_the_references(family, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--parts", "picture", "clip", "wait", "--family", family, "--rounds", "1", "--seconds", "10"]
    assert cli.main(["bench", "processors", *words, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("largest difference of a patch value: 0\n") == 3
    assert "by the clock, times ours" in printed
    figures = json.loads(out.read_text())
    assert len(figures["picture"]) == 4
    assert len(figures["clip"]) == len(figures["wait"]) >= 3
    assert all(timing["cpu"][0] > 0 for part in ("picture", "clip", "wait") for timing in figures[part].values())


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(processors, "_FULL_HD", (320, 200))
    monkeypatch.setattr(processors, "_HD", (160, 96))


def test_different_work_is_not_compared():
    with pytest.raises(AssertionError, match="patches differ"):
        processors._check_equal(np.zeros((2, 3)), np.full((2, 3), 0.1))
    with pytest.raises(AssertionError, match="patches differ"):
        processors._check_equal(np.zeros((2, 3)), np.zeros((2, 4)))


def test_a_clip_lasts_as_long_as_was_asked():
    from processors.video.decoding import Clip
    from processors.video.options import VideoLimits

    info = Clip(clip(64, 48, seconds=10, rate=30), VideoLimits()).info
    assert info.num_frames == 300
    assert np.allclose(np.diff(info.times), 1 / 30, atol=1e-3)


TINY_TOWER = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "num_position_embeddings": 64}


@pytest.fixture(autouse=True)
def small_towers(monkeypatch):
    monkeypatch.setattr(vision, "VISION_SIZES", vision.VISION_SIZES | TINY_TOWER)
    text = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setattr(vision, "_TEXT_SIZES", text)
    monkeypatch.setattr(vision, "_LARGE", (256, 256))


@pytest.fixture
def run(tmp_path):
    subject = TowerSubject(write_checkpoint(tmp_path, depth=4), device=torch.device("cpu"), dtype=torch.bfloat16)
    return vision.TowerRun(subject=subject, rounds=1, max_patches=512)


def test_towers_are_measured(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--depth", "4", "--rounds", "1", "--threads", "1"]
    assert cli.main(["bench", "vision", *words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["rounds"] == 1
    assert "4 of its 24 layers" in found["checkpoint"]
    measures = found["measures"]
    assert {part: len(made) for part, made in measures.items()} == {"cold": 2, "hits": 2, "clips": 1}
    for one in (one for made in measures.values() for one in made):
        assert 0 < one["spread"]["least"] <= one["spread"]["median"] <= one["spread"]["most"]
    assert set(measures["cold"][0]["timings"]) == {"vlmserve", "packed", "one by one"}
    printed = capsys.readouterr().out
    assert printed.count("target: at ") == 5
    assert "12 of 16 temporal patches in common and found" in printed


def test_a_wrong_tower_is_not_timed(run):
    run.subject.tower.get_submodule("blocks.3.norm1").weight.neg_()
    with pytest.raises(AssertionError, match="rows differ by"):
        next(vision.measure_cold(run))


def test_one_row_that_is_off_is_seen():
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert check_rows(rows, rows.clone()) == 0
    assert 0 < check_rows(rows * 1.01, rows) < 0.02
    wrong = rows.clone()
    wrong[7] = wrong[8]
    with pytest.raises(AssertionError, match="rows differ by"):
        check_rows(wrong, rows)
    with pytest.raises(AssertionError, match="float32, not"):
        check_rows(rows.float(), rows)
    with pytest.raises(AssertionError, match=r"\[499, 64\]"):
        check_rows(rows[1:], rows)


def test_alternatives_take_turns():
    order = []
    timings = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b"] * 3
    assert [len(timing.cpu) for timing in timings.values()] == [2, 2]
    assert str(ratios((2.0, 9.0, 4.0), (1.0, 3.0, 1.0))) == "3.00 x (2.00 to 4.00)"


def test_a_target_is_met_from_its_own_side():
    def measure(value, bound):
        return Measure(name="", spread=Spread.of([value]), target=2.0, bound=bound)

    assert [measure(value, "at least").met for value in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [measure(value, "at most").met for value in (1.9, 2.0, 2.1)] == [True, True, False]
    assert Measure(name="", spread=Spread.of([1.0])).met is None


TICK = os.sysconf("SC_CLK_TCK")


def test_the_process_that_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert server_pid(f"http://127.0.0.1:{port}") is None
        listener.listen()
        assert server_pid(f"http://localhost:{port}/v1") == os.getpid()
        # a child that has the socket, too, is not the server's first process
        words = [sys.executable, "-c", "input()"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]) as child:
            assert server_pid(f"http://127.0.0.1:{port}") == os.getpid()
            child.communicate(b"\n")
    assert server_pid("http://example.com:80") is None


def test_cores_of_servers_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server (10) with a child's child, another (20), this process, and somebody else's (30)."""
    me = os.getpid()
    seconds = {10: 5.0, 11: 1.0, 12: 0.0, 20: 7.0, me: 100.0, 30: 3.0}
    parents = {10: me, 11: 10, 12: 11, 20: 1, me: 1, 30: 1}
    machine, now = [1000.0], [50.0]

    def processes() -> dict[int, list[str]]:
        return {
            pid: ["S", str(parents[pid]), *"0" * 9, str(round(seconds[pid] * TICK)), "0", "0", "0"] for pid in seconds
        }

    monkeypatch.setattr(watching, "_processes", processes)
    monkeypatch.setattr(watching, "_machine_seconds", lambda: machine[0])
    monkeypatch.setattr(watching.time, "perf_counter", lambda: now[0])
    watch = CpuWatch([10, 20])
    now[0] += 10
    seconds |= {10: 6.0, 12: 9.0, 20: 8.0, me: 102.0, 30: 8.0}
    machine[0] += 18
    assert watch.cores() == (pytest.approx({10: 1.0, 20: 0.1}), pytest.approx(0.5))
    del seconds[20]  # it has ended: that is no reason to fail
    assert watch.cores()[0][20] == 0
