"""`vlmserve bench trace`: where the device waits for the host, step by step, with a trace to look at.

On a GPU, a kernel or copy belongs to the step whose host code launched it. On a CPU, torch's outermost operators stand
for kernels. This was not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from vlmserve.commands.bench.figures import bench_parser
from vlmserve.commands.offline.inputs import Conversation
from vlmserve.commands.offline.llm import LLM
from vlmserve.engine.step import ModelWorker, OneGroup
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, PendingResult, SamplingBatchInfo
from vlmserve.models.attention.base import ForwardMode
from vlmserve_common.errors import EngineError

Event: TypeAlias = Mapping[str, Any]
"""An event of a Chrome trace; ts and dur in microseconds."""

RANGE = "vlmserve step"
_COPIES = ("gpu_memcpy", "gpu_memset")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize")


@dataclass(kw_only=True)
class StepTrace:
    """One step; times are in microseconds.

    `number` and `kind` are from its range, which began at `began` on the host. `spans` are (start, end) of kernels and
    copies on the device. `launches` counts kernels, and `waits` the calls that waited for the whole stream.
    """

    number: int
    kind: str
    began: float
    spans: list[tuple[float, float]] = field(default_factory=list)
    launches: int = 0
    copies: int = 0
    waits: int = 0

    @property
    def busy(self) -> float:
        """The time that the device was busy."""
        total, until = 0.0, float("-inf")
        for start, end in sorted(self.spans):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    @property
    def first(self) -> float:
        """The time when the device began with the step."""
        return min(start for start, _ in self.spans)

    @property
    def last(self) -> float:
        """The time when the device was done with the step."""
        return max(end for _, end in self.spans)


def range_name(number: int, kind: str) -> str:
    """Return the name of a range of the trace for a part of a step."""
    return f"{RANGE} {number} {kind}"


def read_steps(events: Iterable[Event]) -> list[StepTrace]:
    """Return the steps of a trace that did something, in the order of their launch."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    ranges = sorted(
        (event for event in complete if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE)),
        key=lambda event: event["ts"],
    )
    steps: dict[int, StepTrace] = {}
    owners: list[StepTrace] = []
    for event in ranges:
        number, kind = event["name"].removeprefix(RANGE).split(maxsplit=1)
        owners.append(steps.setdefault(int(number), StepTrace(number=int(number), kind=kind, began=event["ts"])))
    starts = [event["ts"] for event in ranges]

    def owner(event: Event) -> StepTrace | None:
        place = bisect_right(starts, event["ts"]) - 1
        inside = place >= 0 and event["ts"] < starts[place] + ranges[place]["dur"]
        return owners[place] if inside and event.get("tid") == ranges[place].get("tid") else None

    calls = [event for event in complete if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    device = [event for event in complete if event.get("cat") == "kernel" or event.get("cat") in _COPIES]
    launched = {event["args"]["correlation"]: event for event in calls if "correlation" in event.get("args", {})}
    for event in device:
        call = launched.get(event.get("args", {}).get("correlation"))
        _take(owner(call) if call is not None else None, event, copy=event["cat"] in _COPIES)
    if not device:
        for event in _outermost(complete):
            _take(owner(event), event, copy=False)
    for event in calls:
        step = owner(event)
        if step is not None:
            step.waits += event["name"] in _WAITS
    return sorted((step for step in steps.values() if step.spans), key=lambda step: step.number)


def figures(steps: Sequence[StepTrace]) -> dict[str, dict[str, float]]:
    """Return the figures of each kind of steps: their number, and medians, times in microseconds.

    Each step but the first is compared with the one before it. `wall` is the time from the end of one to the end of the
    next. In the time of `busy` the device computed or copied. It was idle for `gaps` inside the step, and for `before`
    between the two.
    """
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for before, step in itertools.pairwise(steps):
        found[step.kind].append(
            {
                "wall": step.last - before.last,
                "busy": step.busy,
                "gaps": step.last - step.first - step.busy,
                "before": max(0.0, step.first - before.last),
                "launches": step.launches,
                "copies": step.copies,
                "waits": step.waits,
            }
        )
    return {
        kind: {"steps": len(each), **{name: statistics.median(one[name] for one in each) for name in each[0]}}
        for kind, each in sorted(found.items())
    }


def _take(step: StepTrace | None, event: Event, *, copy: bool) -> None:
    if step is not None:
        step.spans.append((event["ts"], event["ts"] + event["dur"]))
        step.copies += copy
        step.launches += not copy


def _outermost(events: Iterable[Event]) -> Iterable[Event]:
    """Yield the operators that no other operator of their thread called."""
    until: dict[Any, float] = {}
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        thread = event.get("pid"), event.get("tid")
        if event["ts"] >= until.get(thread, float("-inf")):
            until[thread] = event["ts"] + event["dur"]
            yield event


_ABOUT = """\
A short offline workload under torch's profiler. Writes a trace, and prints medians for each kind of steps: the time
from one's end to the next one's (wall), how long the device was busy, how long it did nothing inside a step (gaps) and
before it, kernels launched, copies, and calls that waited for all of the device's work. On a CPU, torch's operators
stand for kernels; our own are not seen. Recording slows the host down.
"""
_TIMES = ("wall", "busy", "gaps", "before")


class RecordedWorker:
    """A `ModelWorker` that records its steps as ranges of the trace."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker

    def forward(self, batch: ModelWorkerBatch) -> Any:
        """Launch the forward pass inside a range."""
        name = range_name(
            batch.step, f"{ForwardMode(batch.forward_mode).name.lower()} of {len(batch.req_pool_indices)}"
        )
        with torch.profiler.record_function(name):
            return name, self._worker.forward(batch)

    def sample(self, forwarded: Any, info: SamplingBatchInfo) -> PendingResult:
        """Sample inside the range of the same step."""
        name, rest = forwarded
        with torch.profiler.record_function(name):
            return self._worker.sample(rest, info)


def main(argv: Sequence[str]) -> int:
    """Run the workload once to warm up and once recorded, and print a table. Raises EngineError without a device."""
    parser = bench_parser("trace", _ABOUT, has_json=False)
    add = parser.add_argument
    add("--model", default="", help="checkpoint folder or name; the built-in model if left out")
    add("--device", default="auto", help="auto, cuda, cuda:1 ..., or cpu")
    add("--dtype", default="auto", help="as of vlmserve serve")
    add("--requests", type=int, default=8, help="conversations, all at once")
    add("--images", type=int, default=2, help="different pictures, shown in turns; 0: text only")
    add("--image-size", type=int, default=256, help="side of a picture in pixels")
    add("--output-tokens", type=int, default=16, help="tokens of each answer")
    add("--disable-overlap-schedule", action="store_true", help="one step at a time")
    add("--output", type=Path, default=Path("vlmserve-trace.json"), help="where the trace is written")
    args = parser.parse_args(argv)
    settings = {"device": args.device, "dtype": args.dtype, "disable_overlap_schedule": args.disable_overlap_schedule}
    with closing(LLM(args.model, **settings)) as llm:
        print(f"{llm.args.model} on {llm.info.device} in {llm.info.dtype}, torch {torch.__version__}")
        _run(llm, args, seed=0)
        loop = llm.engine.loop
        assert isinstance(loop.worker, OneGroup)
        loop.worker = OneGroup(RecordedWorker(loop.worker.worker))
        # a step is computed by the loop's thread or by the device's
        every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every_thread) as recording:
            _run(llm, args, seed=1)
        recording.export_chrome_trace(str(args.output))
    found = figures(read_steps(json.loads(args.output.read_text())["traceEvents"]))
    if not found:
        raise EngineError(f"{args.output} has fewer than two steps: ask for more --output-tokens")
    print(f"medians of each kind of steps; a trace for https://ui.perfetto.dev or chrome://tracing is in {args.output}")
    print("\n".join(_table(found)))
    return 0


def _run(llm: LLM, args: argparse.Namespace, *, seed: int) -> None:
    """Answer the conversations. seed: of the pictures; another one finds none in a cache."""
    rng = np.random.default_rng(seed)
    pictures = [rng.integers(0, 256, (args.image_size, args.image_size, 3), dtype=np.uint8) for _ in range(args.images)]
    asked: list[Conversation] = []
    for number in range(args.requests):
        shown = [{"type": "image", "image": pictures[number % args.images]}] if pictures else []
        text = {"type": "text", "text": f"What do you see, and how often? Answer {number}."}
        asked.append([{"role": "user", "content": [*shown, text]}])
    llm.chat_batch(asked, max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)


def _table(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = next(iter(found.values()))
    rows = [["", *(f"{name} ms" if name in _TIMES else name for name in names)]]
    for kind, one in found.items():
        rows.append([kind, *(f"{one[name] / 1000:.3f}" if name in _TIMES else f"{one[name]:g}" for name in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
