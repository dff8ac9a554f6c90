"""Alternatives timed in turns, and the figures of a benchmark with their targets.

Taking turns makes a busy machine equally unkind to all alternatives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlmserve.config.flags import CommandParser, positive

_SECRET = ("api_key", "json")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTimes:
    """Seconds of each round: the CPU time of all threads of this process, and the wall clock's."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median, the least and the most of several rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float], scale: float = 1.0) -> Spread:
        """Return the spread of one value or more, each times `scale`."""
        return Spread(median=statistics.median(values) * scale, least=min(values) * scale, most=max(values) * scale)

    def __str__(self) -> str:
        return self.shown(".2f", " x")

    def shown(self, form: str, unit: str = "") -> str:
        """Return the median in `unit`, and the bounds behind it."""
        return f"{self.median:{form}}{unit} ({self.least:{form}} to {self.most:{form}})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A figure in `unit`. target: a bound of the median, None for no target. about: how the figure was made.

    p95: the 95th percentile of all single values, where these were kept.
    """

    name: str
    spread: Spread
    unit: str = "x"
    target: float | None = None
    bound: Literal["at least", "at most"] = "at least"
    about: str = ""
    p95: float | None = None
    timings: dict[str, TurnTimes] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """True if the target is met; None if there is no target."""
        if self.target is None:
            return None
        return self.spread.median >= self.target if self.bound == "at least" else self.spread.median <= self.target

    def __str__(self) -> str:
        form = ".4g" if self.spread.most < 1e4 else ".0f"
        shown = f"  {self.name:<44} {self.spread.shown(form, f' {self.unit}')}"
        if self.p95 is not None:
            shown += f", p95 {self.p95:.4g}"
        if self.target is None:
            return shown
        return f"{shown}; target: {self.bound} {self.target:.3g} {self.unit}, {'met' if self.met else 'missed'}"

    def plain(self) -> dict[str, Any]:
        """Return the figure for JSON."""
        return asdict(self) | {"met": self.met}


def in_turns(
    alternatives: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, TurnTimes]:
    """Call each alternative once to warm up, then all of them in every round. clock: CPU time in seconds."""
    cpu: dict[str, list[float]] = {name: [] for name in alternatives}
    wall: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(rounds + 1):
        for name, function in alternatives.items():
            cpu_before, wall_before = clock(), time.perf_counter()
            function()
            cpu[name].append(clock() - cpu_before)
            wall[name].append(time.perf_counter() - wall_before)
    return {name: TurnTimes(cpu=tuple(cpu[name][1:]), wall=tuple(wall[name][1:])) for name in alternatives}


def ratios(slow: Sequence[float], quick: Sequence[float]) -> Spread:
    """Return how many times as long `slow` took as `quick`, round by round."""
    return Spread.of([a / b for a, b in zip(slow, quick, strict=True)])


def milliseconds(name: str, rounds: Sequence[Sequence[float]], target: float | None = None, about: str = "") -> Measure:
    """Return the spread of the rounds' medians. rounds: seconds of the single values of each."""
    medians = [statistics.median(one) for one in rounds]
    p95 = 1e3 * float(np.percentile(np.concatenate(rounds), 95))
    return Measure(
        name=name, spread=Spread.of(medians, 1e3), unit="ms", target=target, bound="at most", about=about, p95=p95
    )


def show(part: str, measures: Iterable[Measure]) -> list[Measure]:
    """Print a part's figures as they come, each under a line that says how it was made; return them."""
    shown, about = [], None
    for one in measures:
        if one.about != about:
            about = one.about
            print(f"\n{part}: {about}")
        print(one, flush=True)
        shown.append(one)
    return shown


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.default is None or action.default is False or action.default == []
        return action.help if without else super()._get_help_string(action)


def bench_parser(
    name: str, about: str, *, has_json: bool = True, rounds: int | None = None, parts: Iterable[str] = (), **more: Any
) -> CommandParser:
    """Return a parser for `vlmserve bench NAME` that shows defaults and, with `has_json`, takes --json FILE.

    rounds: the default of --rounds; None: there is no such flag. parts: the choices of --parts, all by default.
    """
    more = {"usage": "%(prog)s [options]", "formatter_class": _Formatter, **more}
    parser = CommandParser(prog=f"vlmserve bench {name}", description=about, **more)
    if parts:
        text = "what to measure"
        parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts), help=text)
    if rounds:
        text = "rounds in which the alternatives take turns"
        parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help=text)
    if has_json:
        text = "write the settings and all figures to this file"
        parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    return parser


def write_json(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write the settings of the command line and the figures to the file of --json, if it was given."""
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in _SECRET}
        args.json.write_text(json.dumps({"settings": settings, **found}, indent=2, default=str) + "\n")


def show_and_write(args: argparse.Namespace, parts: Mapping[str, Iterable[Measure]], **more: Any) -> None:
    """Print the figures of each part as they come, and write all as `write_json` does."""
    measures = {part: [one.plain() for one in show(part, made)] for part, made in parts.items()}
    write_json(args, {**more, "measures": measures})
