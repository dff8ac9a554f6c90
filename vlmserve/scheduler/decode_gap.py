"""How long prompts and pictures may keep answers waiting between two of their tokens.

docs/scheduling.md ("Pictures and long prompts beside decoding") derives the rule. It protects an answer from other
flows. Within a flow it does what ends the flow's requests sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FIRST_ANSWER_TOKENS = 128.0
"""The expected length of answers before any has ended."""
LEAST_GAP_S = 0.002
CEILING_S, CEILING_STEPS = 0.25, 5
"""The ceiling without a setting: people read slower than four tokens a second. It is at least so many decode steps,
for a slow machine to do anything else."""


class FlowLoad(NamedTuple):
    """A flow with answers that decode. joining: its requests whose pictures or prompts are being computed, or wait for
    that. unattended: nobody reads its answers before they are whole."""

    joining: int
    unattended: bool = False


class GapCosts(NamedTuple):
    """Measured costs. decode_s: seconds of a decode step. join_s: of the work that brings one more request to decode.
    answer_tokens: the mean length of answers."""

    decode_s: float
    join_s: float
    answer_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GapRule:
    """The rule. slowdown: --max-decode-slowdown, 0 for no limit. ceiling_s: --max-time-between-tokens-s, None if it is
    not set."""

    slowdown: float
    ceiling_s: float | None = None

    def gap(self, flows: Iterable[FlowLoad], costs: GapCosts) -> tuple[float, bool]:
        """Return the seconds between two decode steps that are for other work, and whether all flows with answers gain
        by such a long gap. flows: these flows."""
        if not self.slowdown:
            return float("inf"), True
        protected_s = max((self.slowdown - 1) * costs.decode_s, LEAST_GAP_S)
        pace_s = max(CEILING_S, CEILING_STEPS * costs.decode_s) if self.ceiling_s is None else self.ceiling_s
        patient_s = pace_s - costs.decode_s
        # so late the first half of the answers would end
        shared_s = pace_s * costs.answer_tokens / 2
        shares = costs.join_s <= shared_s and all(flow.joining or flow.unattended for flow in flows)
        if shares and patient_s > protected_s:
            return patient_s, True
        return protected_s, False
