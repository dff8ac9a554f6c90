"""`vlmserve bench gpu` and `bench trace`, on a CPU: what they measure, count, and read out of a trace."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests import hf_env  # noqa: F401  # noqa: F401
from vlmserve import cli
from vlmserve.commands.bench.checkpoints import SHAPES, small, write_folder
from vlmserve.commands.bench.figures import Spread
from vlmserve.commands.bench.gpu import measures
from vlmserve.commands.bench.gpu.command import BARS, Bar, default_parts, table, verdict
from vlmserve.commands.bench.gpu.measures import PARTS, GpuFigure, measured
from vlmserve.commands.bench.gpu.run import SMALL, Budget, GpuRun
from vlmserve.commands.bench.reference import Reference, share_weights
from vlmserve.commands.bench.trace import figures, range_name, read_steps
from vlmserve.models.floors import decode_bytes, part_hit, prefill_flops, tower_flops
from vlmserve.models.random_weights import random_model
from vlmserve.models.vlm import VisionLanguageModel


@pytest.fixture(scope="module")
def outlines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionLanguageModel]:
    """Full-size, without weights."""
    made = tmp_path_factory.mktemp("shapes")
    return {name: random_model(write_folder(made / name, shape), "meta") for name, shape in SHAPES.items()}


def test_it_runs_and_tells_what_it_measured(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--small", "--rounds", "1", "--dtype", "float32", "--json", str(out)]
    parts = default_parts("2b", torch.device("cpu"))
    assert cli.main(["bench", "gpu", *words, "--parts", *parts]) == 0
    written = json.loads(out.read_text())
    assert {"commit", "torch", "transformers", "device", "seconds"} <= set(written["about"])
    figures = {one["key"]: one for one in written["figures"]}
    failed = {key: one["error"] for key, one in figures.items() if one["error"]}
    assert failed == {}
    measured_here = {"copy", "gemm", "logits", "prefill", "tower", "encode", "first-token", "overlap"}
    measured_here |= {"many-batched", "many-alone", *(f"decode-{batch}" for batch in SMALL.batches)}
    measured_here |= {"delta-net-prefill", *(f"delta-net-{batch}" for batch in SMALL.batches)}
    assert set(figures) == measured_here
    assert all(figures[key]["ours"] for key in measured_here)
    # not of those that are differences of two times: here they are tiny
    for key in ("copy", "gemm", "prefill", "tower", "encode", "first-token", "many-batched", "many-alone"):
        assert figures[key]["ours"]["median"] > 0
    assert figures["logits"]["ours"]["median"] < 1e-4, "float32: both do the same work"
    for key in ("decode-1", "prefill", "tower", "first-token", "many-batched", "many-alone"):
        assert figures[key]["theirs"]
    printed = capsys.readouterr().out
    assert "torch: " in printed
    assert "| <= 2 | not measured |" in printed, "bars are of a GPU, at full size"


def small_run(folder: Path, name: str) -> GpuRun:
    return GpuRun(
        folder=write_folder(folder, small(SHAPES[name])),
        load=SMALL,
        device=torch.device("cpu"),
        dtype=torch.float32,
        rounds=1,
        budget=Budget(100),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8b", "qwen2.5-7b", "30b-a3b"])
def test_other_families_share_their_weights_with_transformers(tmp_path, name):
    with closing(small_run(tmp_path, name)) as run:
        figures = [figure for part in ("agreement", "tower") for figure in measured(part, run)]
    assert [figure.error for figure in figures] == [""] * 3
    ours, theirs = run.engine.model, run.theirs.model
    assert theirs.lm_head.weight.data_ptr() == ours.lm_head.weight.data_ptr()
    attention, layer = ours.language_model.layers[1].self_attn.qkv_proj, theirs.model.language_model.layers[1]
    assert layer.self_attn.q_proj.weight.data_ptr() == attention.weight.data_ptr()


def test_models_with_other_parameters_are_not_compared(tmp_path):
    untied, tied = (write_folder(tmp_path / name, small(SHAPES[name])) for name in ("8b", "2b"))
    model = random_model(tied)
    model.lm_head = torch.nn.Identity()  # as if it were not tied, but for the weights
    with pytest.raises(AssertionError, match=r"other parameters: \['lm_head.weight'\] are missing"):
        share_weights(untied, model, device=torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(["bench", "gpu"]) == 1
    assert "finds no CUDA device here; --device cpu --small tries the benchmark out" in capsys.readouterr().err


def test_a_part_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def broken(run: GpuRun):
        yield GpuFigure(key="first", name="first", ours=Spread.of([1.0]))
        raise RuntimeError("out of order\nmore")

    monkeypatch.setattr(measures, "PARTS", {**PARTS, "decode": broken})
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--small", "--parts", "decode", "ceilings", "--rounds", "1", "--json", str(out)]
    assert cli.main(["bench", "gpu", *words]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert [one["key"] for one in figures] == ["first", "decode", "copy", "gemm"]
    assert figures[1]["error"] == "RuntimeError: out of order"


@pytest.mark.slow
def test_where_transformers_fails_ours_is_shown(tmp_path, monkeypatch):
    def no_memory(self, inputs, tokens):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(Reference, "generate", no_memory)
    with closing(small_run(tmp_path, "2b")) as run:
        figures = [figure for part in ("decode", "prefill", "first-token", "many") for figure in measured(part, run)]
    assert [figure.key for figure in figures] == ["decode-1", "decode-4", "prefill", "first-token", "many-batched"]
    for figure in figures:
        assert (figure.error, figure.theirs) == ("", None)
        assert figure.ours is not None
        assert ("transformers failed: OutOfMemoryError: CUDA out of memory." in figure.about) is (
            figure.key != "decode-4"  # of the largest batch it is not asked
        )


def test_when_the_time_is_over_parts_are_left_out_and_say_so(capsys):
    words = ["--device", "cpu", "--small", "--parts", "ceilings", "--budget-s", "0"]
    assert cli.main(["bench", "gpu", *words]) == 0
    assert "no time was left for it (--budget-s)" in capsys.readouterr().out


def test_rounds_end_when_another_one_would_last_too_long():
    now = [0.0]
    budget = Budget(10, lambda: now[0])
    done = []
    for number in budget.rounds(5):
        done.append(number)
        now[0] += 4
    assert done == [0, 1]
    assert list(budget.rounds(5)) == [0, 1, 2, 3, 4]
    now[0] = 20
    assert list(budget.rounds(5)) == [0], "once in any case"


def test_a_decode_step_reads_the_experts_that_are_hit(outlines):
    """Counted by hand from the published sizes."""
    moe, vocab = outlines["30b-a3b"], 2048 * 151936
    expert = 3 * 2048 * 768
    layer = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128 + 128 * 2048 + 2 * 2048
    plain = 48 * layer + 2048 + vocab
    assert decode_bytes(moe, 0, requests=1) == pytest.approx(2 * (plain + 48 * 8 * expert), rel=1e-9)
    assert 61e9 < decode_bytes(moe, 0, requests=10000) + 2 * vocab < 62.2e9, "all of them"
    # two tokens share 8 * 8 / 128 of their experts, as far as chance goes
    assert 128 * part_hit(moe.config.experts, 2) == pytest.approx(15.5)
    assert part_hit(None, 3) == 0
    active = 48 * (layer - 2 * 128 - 2 * 2048 + 8 * expert)
    assert prefill_flops(moe, 1) == 2 * active + 4 * 48 * 4096 + 2 * vocab


def test_operations_of_the_towers(outlines):
    # Qwen2.5-VL: four layers attend to all, 28 inside windows of 64 patches. Without windows: see docs/parallel.md.
    patches, layer = 4096, 2 * (4 * 1280**2 + 3 * 1280 * 3420)
    embed, merger = 2 * 1176 * 1280, 2 * ((4 * 1280) ** 2 + 4 * 1280 * 3584)
    attention = 4 * 1280 * patches * (4 * patches + 28 * 64)
    wanted = patches * (embed + 32 * layer) + patches / 4 * merger + attention
    assert tower_flops(outlines["qwen2.5-7b"].visual, 1, patches) == wanted
    assert tower_flops(outlines["qwen2.5-7b"].visual, 16, patches) == 16 * wanted


def test_shapes_have_the_published_sizes(outlines):
    billions = {name: sum(one.numel() for one in model.parameters()) / 1e9 for name, model in outlines.items()}
    expected = {"2b": 2.13, "4b": 4.44, "8b": 8.77, "32b": 33.36, "30b-a3b": 31.07, "235b-a22b": 235.67}
    assert billions == pytest.approx(expected | {"qwen2.5-3b": 3.75, "qwen2.5-7b": 8.29}, abs=0.005)
    assert {model.config.head_dim for model in outlines.values()} == {128}


def test_bars():
    most, least = Bar("<=", 1.35), Bar(">=", 0.6)
    figure = GpuFigure(key="decode-1", name="decode", value=1.3)
    assert verdict(figure, most, counts=True) == "met"
    assert verdict(figure, least, counts=True) == "met"
    assert verdict(figure, Bar("<=", 1.2), counts=True) == "not met"
    assert verdict(figure, most, counts=False) == "not measured"
    assert verdict(GpuFigure(key="decode-1", name="decode", error="no room"), most, counts=True) == "not measured"
    assert verdict(figure, None, counts=True) == ""
    rows = table([figure], BARS["8b"], counts=True).splitlines()
    assert rows[2] == "| decode |  |  | 1.3 | <= 1.35 | met |"
    assert len(rows) == 2 + len(BARS["8b"]), "bars whose figures are missing are shown, too"
    assert all("| not measured |" in row for row in rows[3:])


HOST, OTHER = 1, 2


def event(name, cat, ts, dur, *, tid=HOST, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def step(number: int, at: float, kernels: list[tuple[float, float]], *, kind: str = "decode of 2", waits: int = 0):
    """A step whose host part begins at `at`, and whose last kernel is a copy; kernels: (start, duration) on the GPU."""
    yield event(range_name(number, kind), "user_annotation", at, 10)
    for place, (start, dur) in enumerate(kernels):
        correlation = 100 * number + place
        last = place == len(kernels) - 1
        name, cat = ("cudaMemcpyAsync", "gpu_memcpy") if last else ("cudaLaunchKernel", "kernel")
        yield event(name, "cuda_runtime", at + 1 + place, 0.5, correlation=correlation)
        yield event("work", cat, start, dur, tid=7, correlation=correlation)
    for place in range(waits):
        yield event("cudaStreamSynchronize", "cuda_runtime", at + 8 + 0.1 * place, 0.05)


def test_a_gpu_s_steps():
    """The second is launched while the first is computed; the third waits for it."""
    events = [
        *step(1, 0, [(20, 10), (30, 10), (45, 5)]),
        *step(2, 12, [(50, 10), (58, 12), (75, 5)]),
        *step(3, 90, [(100, 4), (110, 10)], waits=2),
        # of others: an encoder's kernel, and a call outside of every step
        event("encoder", "cuda_runtime", 11, 0.5, correlation=9999),
        event("encoder", "kernel", 20, 100, tid=8, correlation=9999),
        event("cudaStreamSynchronize", "cuda_runtime", 85, 1),
        event("cudaStreamSynchronize", "cuda_runtime", 1, 1, tid=OTHER),
        {"ph": "M", "name": "process_name", "pid": 1},
    ]
    first, second, third = read_steps(reversed(events))
    assert (first.number, first.kind, first.busy) == (1, "decode of 2", 25)
    assert (second.busy, second.launches, second.copies, second.waits) == (25, 2, 1, 0), "what overlaps counts once"
    assert (third.launches, third.copies, third.waits) == (1, 1, 2)
    [found] = figures([first, second]).values()
    assert list(found) == ["steps", "wall", "busy", "gaps", "before", "launches", "copies", "waits"]
    assert tuple(found.values()) == (1, 30, 25, 5, 0, 2, 1, 0)
    [found] = figures([second, third]).values()
    assert tuple(found.values()) == (1, 40, 14, 6, 20, 1, 1, 2)


def test_kinds_are_apart_and_medians():
    events = [
        e for n, dur in enumerate((5, 5, 7, 30)) for e in step(n, 100 * n, [(100 * n + 20, dur), (100 * n + 60, 1)])
    ]
    events += step(9, 900, [(920, 40), (970, 1)], kind="extend of 1")
    found = figures(read_steps(events))
    assert {kind: (one["steps"], one["busy"]) for kind, one in found.items()} == {
        "decode of 2": (3, 8),
        "extend of 1": (1, 41),
    }


def test_on_a_cpu_outermost_operators_stand_for_kernels():
    events = [
        event(range_name(1, "decode of 1"), "user_annotation", 0, 50),
        event("aten::linear", "cpu_op", 1, 10),
        event("aten::addmm", "cpu_op", 2, 8),
        event("aten::add", "cpu_op", 20, 5),
        event("aten::add", "cpu_op", 21, 5, tid=OTHER),
    ]
    [only] = read_steps(events)
    assert (only.launches, only.busy) == (2, 15)


def test_a_trace_is_a_table(tmp_path, capsys):
    out = tmp_path / "trace.json"
    words = ["--device", "cpu", "--requests", "2", "--images", "1", "--output-tokens", "4", "--image-size", "64"]
    assert cli.main(["bench", "trace", *words, "--output", str(out)]) == 0
    steps = read_steps(json.loads(out.read_text())["traceEvents"])
    assert "decode of 2" in [one.kind for one in steps]
    assert all(one.launches > 0 and one.busy > 0 for one in steps)
    printed = capsys.readouterr().out
    assert str(out) in printed
    header, *rows = printed.splitlines()[-1 - len({one.kind for one in steps[1:]}) :]
    assert header.split()[:3] == ["steps", "wall", "ms"]
    assert any(row.split()[:3] == ["decode", "of", "2"] for row in rows)


def test_too_short_a_workload_is_told(tmp_path, capsys):
    words = ["--device", "cpu", "--requests", "1", "--images", "0", "--output-tokens", "1"]
    assert cli.main(["bench", "trace", *words, "--output", str(tmp_path / "trace.json")]) == 1
    assert "ask for more --output-tokens" in capsys.readouterr().err
