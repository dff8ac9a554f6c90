"""The steps in a trace of torch's profiler: busy and idle times, launches, copies, and calls that wait.

On a GPU, a kernel or copy belongs to the step whose host code launched it. On a CPU, torch's outermost operators stand
for kernels.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

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
