"""The figures of `vlmserve bench gpu`, the bars that they are held to, and how both are shown and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from vlmserve.commands.bench.figures import Spread

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFigure:
    """A figure that was measured, or an error that says why not. key: its name in bars and JSON.

    `ours` and `theirs` are our spread and transformers', in `unit`. `value` is the number that a bar limits; `of` says
    of which kind it is ("x the floor", "of the GEMM rate" ...). `about` has more to know.
    """

    key: str
    name: str
    unit: str = ""
    ours: Spread | None = None
    theirs: Spread | None = None
    value: float | None = None
    of: str = ""
    about: str = ""
    error: str = ""


class Bar(NamedTuple):
    """A limit of a figure's `value`."""

    sign: Literal["<=", ">="]
    limit: float

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"


_EVERY = {"overlap": Bar(">=", 0.9), "many-batched": Bar(">=", 3), "many-alone": Bar(">=", 8)}
_8B = {"decode-1": Bar("<=", 1.35), "decode-64": Bar("<=", 1.5), "prefill": Bar(">=", 0.6), "tower": Bar(">=", 0.45)}
BARS: Mapping[str, Mapping[str, Bar]] = MappingProxyType(
    {
        "2b": _EVERY | {"decode-1": Bar("<=", 2), "loading": Bar("<=", 20)},
        "8b": _EVERY | _8B,
        "qwen2.5-7b": _EVERY,
        "30b-a3b": _EVERY,
    }
)
"""The bars on one H200, by model shape and key of a figure: ratios to what the same run measures."""


def verdict(figure: GpuFigure, bar: Bar | None, *, counts: bool) -> str:
    """Return "met", "not met", "not measured" or "". counts: True on a GPU at full size, where bars have a meaning."""
    if bar is None:
        return ""
    if figure.value is None or not counts:
        return NOT_MEASURED
    met = figure.value <= bar.limit if bar.sign == "<=" else figure.value >= bar.limit
    return "met" if met else "not met"


def line(figure: GpuFigure) -> str:
    """Return a figure as a line, for people who wait."""
    if figure.error:
        return f"{figure.name}: {NOT_MEASURED}: {figure.error}"
    parts = [f"{_shown(figure.ours)} {figure.unit}".strip()] if figure.ours else []
    if figure.value is not None:
        parts.append(f"{figure.value:.3g} {figure.of}".strip())
    if figure.theirs:
        parts.append(f"transformers {_shown(figure.theirs)} {figure.unit}")
    return f"{figure.name}: {'; '.join([*parts, *[figure.about] * bool(figure.about)])}"


def table(figures: Sequence[GpuFigure], bars: Mapping[str, Bar], *, counts: bool) -> str:
    """Return all figures as a Markdown table, with a row for each bar whose figure is missing."""
    rows = [("figure", "ours", "transformers", "ratio to ...", "bar", ""), ("---",) * 6]
    for figure in figures:
        value = "" if figure.value is None else f"{figure.value:.3g} {figure.of}"
        ours = f"{_shown(figure.ours)} {figure.unit}" if figure.ours else figure.error and NOT_MEASURED
        bar = bars.get(figure.key)
        met = verdict(figure, bar, counts=counts)
        rows.append((figure.name, ours, _shown(figure.theirs), value, str(bar or ""), met))
    there = {figure.key for figure in figures}
    rows += [(key, "", "", "", str(bar), NOT_MEASURED) for key, bar in bars.items() if key not in there]
    return "\n".join("| " + " | ".join(cell.replace("|", "/").strip() for cell in row) + " |" for row in rows)


def write_figures(
    path: Path, about: Mapping[str, str], figures: Sequence[GpuFigure], bars: Mapping[str, Bar], *, counts: bool
) -> None:
    """Write all figures so far. A reader sees the old file or the new one."""
    rows: list[dict[str, Any]] = [
        asdict(one) | {"bar": str(bars.get(one.key, "")), "verdict": verdict(one, bars.get(one.key), counts=counts)}
        for one in figures
    ]
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"about": dict(about), "figures": rows}, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.4g}" if spread.least == spread.most else spread.shown(".4g")
