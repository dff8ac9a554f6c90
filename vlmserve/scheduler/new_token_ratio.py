"""How much of their remaining output running requests are expected to use."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.scheduler.req import Req

_INITIAL, _FLOOR, _DECAY_STEPS = 0.7, 0.1, 600
_STEPS_AHEAD = 20


class NewTokenRatio:
    """Starts cautious, decays with every decode step, jumps up when a request had to be retracted."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(_INITIAL * conservativeness, 1.0)
        self._floor = min(_FLOOR * conservativeness, self._initial)
        self.value = self._initial

    def decay(self) -> None:
        """One decode step went well."""
        self.value = max(self.value - (self._initial - self._floor) / _DECAY_STEPS, self._floor)

    def raise_after_retraction(self, running: Sequence[Req]) -> None:
        """The share of their output that the remaining requests will have used some steps from now."""
        used = sum(len(req.output_ids) + _STEPS_AHEAD for req in running)
        total = sum(req.max_new_tokens for req in running)
        self.value = min(1.0, max(self.value, used / max(total, 1)))

    def reset(self) -> None:
        """Nothing runs."""
        self.value = self._initial
