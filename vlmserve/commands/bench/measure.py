"""A figure of a benchmark, with what is aimed at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vlmserve.commands.bench.interleaved import Spread, Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One figure, in `unit`. target: what is aimed at, as a bound of the median, None for none. about: what was done,
    and what else there is to know."""

    name: str
    spread: Spread
    unit: str = "x"
    target: float | None = None
    bound: Literal["at least", "at most"] = "at least"
    about: str = ""
    timings: dict[str, Timing] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.spread.median >= self.target if self.bound == "at least" else self.spread.median <= self.target

    def __str__(self) -> str:
        aim = "no target"
        if self.target is not None:
            aim = f"target: {self.bound} {self.target:.3g} {self.unit}, {'met' if self.met else 'missed'}"
        return f"  {self.name} {self.spread.shown('.3g', f' {self.unit}')}; {aim}"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self)
        spread = fields.pop("spread")
        return fields | {"value": spread["median"], "least": spread["least"], "most": spread["most"], "met": self.met}


def show(part: str, measures: list[Measure]) -> None:
    """Print a part's figures, each under what was done."""
    for about in dict.fromkeys(one.about for one in measures):
        print(f"\n{part}: {about}")
        for one in measures:
            if one.about == about:
                print(one, flush=True)
