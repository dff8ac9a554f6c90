"""`vlmserve bench trace`: what is read out of a GPU's trace, by one made up, and the whole of it on a CPU."""

from __future__ import annotations

import json

from tests import hf_env  # noqa: F401
from vlmserve import cli
from vlmserve.commands.bench.trace import figures, range_name, read_steps

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


def test_it_runs_and_prints_a_table(tmp_path, capsys):
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
