"""What `vlmserve bench peers` found, for people: medians over the rounds, and ratios round by round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from vlmserve.commands.bench.interleaved import Spread, ratios
from vlmserve.commands.bench.quiet import LIMIT_CORES


class _Row(NamedTuple):
    title: str
    times: float
    form: str
    more_is_better: bool = False


_ROWS: Mapping[str, _Row] = {
    "ttft_s": _Row("first token, s", 1, ".3f"),
    "ttft_new_s": _Row("first token of a new picture, s", 1, ".3f"),
    "ttft_seen_s": _Row("first token of a seen picture, s", 1, ".3f"),
    "tpot_s": _Row("each further token, ms", 1000, ".1f"),
    "tokens_per_s": _Row("tokens/s", 1, ".1f", more_is_better=True),
}
_WIDTH = 34


def show(labels: Sequence[str], works: Mapping[str, str], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print a table for each workload; labels: of the servers, the first of which is set beside the others. works:
    name -> what it is. Returns the figures of the tables."""
    summary = {}
    for name, what in works.items():
        print(f"\n{name}: {what}")
        beside = [f"{labels[0]} beside {label}" for label in labels[1:]]
        print("".ljust(_WIDTH) + "".join(title.rjust(28) for title in [*labels, *beside]))
        mine = {label: [run for run in runs if (run["workload"], run["label"]) == (name, label)] for label in labels}
        rows = {}
        for key, row in _ROWS.items():
            if any(key in run for several in mine.values() for run in several):
                rows[key] = _compare(mine, key, row)
                _print_row(row, rows[key])
        _print_about(mine)
        summary[name] = rows
    return summary


def _compare(mine: Mapping[str, Sequence[dict[str, Any]]], key: str, row: _Row) -> dict[str, Any]:
    """Each server's median, and how many times as fast the first is as each other one."""
    first, *rest = mine
    found: dict[str, Any] = {"medians": {}, "ratios": {}}
    for label, several in mine.items():
        values = [run[key] for run in several if key in run]
        found["medians"][label] = asdict(Spread.of(values)) if values else None
    for label in rest:
        pairs = [(a[key], b[key]) for a, b in zip(mine[first], mine[label], strict=True) if key in a and key in b]
        ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
        slow, quick = (ours, theirs) if row.more_is_better else (theirs, ours)
        found["ratios"][label] = asdict(ratios(slow, quick)) if pairs else None
    return found


def _print_row(row: _Row, found: Mapping[str, Any]) -> None:
    cells = []
    for median in found["medians"].values():
        scaled = median and Spread(**{name: value * row.times for name, value in median.items()})
        cells.append(scaled.shown(row.form) if scaled else "-")
    cells += [str(Spread(**ratio)) if ratio else "-" for ratio in found["ratios"].values()]
    print(f"  {row.title}".ljust(_WIDTH) + "".join(cell.rjust(28) for cell in cells))


def _print_about(mine: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """How quiet the machine was, the prompts' length as the servers count it, and what went wrong."""
    cells = []
    for several in mine.values():
        others = [run["others_cores"] for run in several if "others_cores" in run]
        cells.append(Spread.of(others).shown(".2f") if others else "not known")
    print("  CPU taken by others, cores".ljust(_WIDTH) + "".join(cell.rjust(28) for cell in cells))
    prompts = [
        "/".join(sorted({f"{run['prompt_tokens']:g}" for run in runs if "prompt_tokens" in run}))
        for runs in mine.values()
    ]
    print("  prompt tokens".ljust(_WIDTH) + "".join((cell or "-").rjust(28) for cell in prompts))
    for label, several in mine.items():
        busy = sum(run.get("others_cores", 0.0) >= LIMIT_CORES for run in several)
        if busy:
            print(f"  {label}: the machine was not quiet in {busy} of {len(several)} runs")
        if any(run.get("idle_servers_cores", 0.0) >= LIMIT_CORES for run in several):
            print(f"  {label}: a server that was not measured took CPU time meanwhile")
        short = sum(run.get("short", 0) for run in several)
        if short:
            print(f"  {label}: {short} answers ended early")
        failed = sum(run["failed"] for run in several)
        words = list(dict.fromkeys(word for run in several for word in run.get("failures", ())))
        if failed:
            print(f"  {label}: {failed} requests failed: {'; '.join(map(json.dumps, words[:3]))}")
