"""What the scheduler expects: how long steps take, and how much of their output requests will use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from vlmserve.scheduler.decode_gap import CEILING_STEPS, FIRST_ANSWER_TOKENS, LEAST_GAP_S, FlowLoad, GapCosts, GapRule
from vlmserve.scheduler.req import Req

_INITIAL_RATIO, _LEAST_RATIO, _DECAY_STEPS = 0.7, 0.1, 600
_STEPS_AHEAD = 20
_SMOOTH = 0.2
_MIN_IDLE_SLICE_S = 0.05  # shorter slices are cut into smaller pieces, which cost more
_LEAST_CHANGE, _MOST_CHANGE = 0.5, 1.25
_MARGIN = 0.85
_LEAST_TOKENS = 16  # fewer cost about as much
_FIRST_RATE = 2560.0


class _PromptRate:
    """The prompt tokens a second that steps should have, so that they take the time that they are allowed.

    The rate grows or shrinks as the last step was too short or too long, so it follows the length of prompts, batch
    mates, and a busy machine.
    """

    def __init__(self, least: int) -> None:
        self._rate, self._least = _FIRST_RATE, least

    def tokens(self, seconds: float) -> int:
        """Return how many prompt tokens should take so long."""
        return max(int(self._rate * seconds), self._least)

    def observe(self, tokens: int, seconds: float, allowed_s: float) -> None:
        """Note that so many prompt tokens took so long."""
        limit = self._rate * allowed_s
        change = min(max(_MARGIN * allowed_s / max(seconds, 1e-9), _LEAST_CHANGE), _MOST_CHANGE)
        rate = min(limit, tokens) * change / allowed_s
        if change < 1:
            # the smallest chunk may be too long for what is left of a gap, and is as quick as others all the same
            self._rate = max(rate, _MARGIN * tokens / max(seconds, 1e-9))
        elif tokens >= limit - self._least:  # a smaller chunk says nothing of a larger one
            self._rate = max(rate, self._rate)


class StepCosts:
    """Measures steps, and says how much fits into the next one.

    Between two tokens of running requests there is a gap for a chunk of a prompt or a slice of a picture's encoding,
    see `decode_gap`. If nothing decodes, a newcomer waits for one chunk or slice at the most, and these take no longer
    than --max-step-s, or than five steps of decoding on a slow machine.

    rule: how long the gap is. max_step_s: 0 for no limit. patient: the answers that decode gain by a long gap. It has
    room for slices, and for one chunk behind them. gap_s: what is left of it; infinite without a limit.
    """

    def __init__(self, rule: GapRule, *, max_step_s: float, page_size: int) -> None:
        self._rule = rule
        self._max_step_s = max_step_s or math.inf
        self._decode_s: float | None = None
        self._prompts = _PromptRate(max(_LEAST_TOKENS, page_size))
        self._join_s = self._since_join_s = 0.0
        self._answer_tokens = FIRST_ANSWER_TOKENS
        self.gap_s = self._whole_gap_s = math.inf
        self.patient = True

    def set_gap(self, flows: Iterable[FlowLoad]) -> None:
        """Choose the gap before the next decode step. flows: those that have answers which decode."""
        costs = GapCosts(self._decode_s or 0.0, max(self._join_s, self._since_join_s), self._answer_tokens)
        was_patient = self.patient
        self._whole_gap_s, self.patient = self._rule.gap(flows, costs)
        goes_on = was_patient and self.patient
        self.gap_s = min(self.gap_s, self._whole_gap_s) if goes_on else self._whole_gap_s

    def decoded(self) -> None:
        """Note that a decode step has been decided: a new gap begins."""
        self.gap_s = self._whole_gap_s

    def take_slice_s(self, *, decoding: bool) -> float:
        """Return the seconds of encoding before the next step, and take them from a long gap."""
        if decoding and not self.patient:
            return _MARGIN * self.gap_s
        # a newcomer waits for one slice: about as long as its own step takes
        usual_s = self._max_step_s
        if self._decode_s is not None and not (decoding and math.isinf(self.gap_s)):
            usual_s = min(max(self._decode_s, _MIN_IDLE_SLICE_S), usual_s)
        if decoding:
            usual_s = min(usual_s, max(self.gap_s, 0.0))
            self.gap_s -= usual_s
        return usual_s

    def allowed_s(self, *, beside: bool) -> float:
        """Return the seconds that prompts of the next step may take. beside: whether requests decode."""
        if beside:
            return max(self.gap_s, LEAST_GAP_S)
        return max(self._max_step_s, CEILING_STEPS * (self._decode_s or 0.0))  # each chunk reads the weights anew

    def observe(
        self, *, prompt_tokens: int, decoding: int, allowed_s: float, joined: int, seconds: float
    ) -> tuple[float, float]:
        """Note a step. Returns the seconds that its prompts and its decoding took, about.

        decoding: how many requests got a token of it. joined: how many prompts it completed. allowed_s: for prompts,
        when the step was decided.
        """
        decode_s = self._decode_s or 0.0
        if not prompt_tokens:
            before = seconds if self._decode_s is None else self._decode_s
            self._decode_s = before + _SMOOTH * (seconds - before)
            return 0.0, seconds
        prompt_s = seconds - min(decode_s, 0.75 * seconds) if decoding else seconds
        if math.isfinite(allowed_s):
            self._prompts.observe(prompt_tokens, prompt_s, allowed_s)
        self._since_join_s += prompt_s
        if joined:
            each = self._since_join_s / joined
            self._join_s += (_SMOOTH if self._join_s else 1.0) * (each - self._join_s)
            self._since_join_s = 0.0
        return prompt_s, seconds - prompt_s

    def encoded(self, seconds: float) -> None:
        """Note that a slice of encoding took so long."""
        self._since_join_s += seconds

    def answered(self, tokens: int) -> None:
        """Note the length of an answer that has ended."""
        self._answer_tokens += _SMOOTH * (tokens - self._answer_tokens)

    def chunk_tokens(self, *, beside: bool) -> int | None:
        """Return the most prompt tokens of the next step; None for no limit of this kind."""
        allowed_s = self.allowed_s(beside=beside)
        return self._prompts.tokens(allowed_s) if math.isfinite(allowed_s) else None


class NewTokenRatio:
    """The share of their remaining output that running requests are expected to use.

    The ratio starts cautious, decays with every decode step, and jumps up when a request had to be retracted.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(_INITIAL_RATIO * conservativeness, 1.0)
        self._floor = min(_LEAST_RATIO * conservativeness, self._initial)
        self.value = self._initial

    def decay(self) -> None:
        """Note that a decode step went well."""
        self.value = max(self.value - (self._initial - self._floor) / _DECAY_STEPS, self._floor)

    def raise_after_retraction(self, running: Sequence[Req]) -> None:
        """Raise the ratio to the share of their output that the remaining requests will have used some steps on."""
        used = sum(len(req.output_ids) + _STEPS_AHEAD for req in running)
        total = sum(req.max_new_tokens for req in running)
        self.value = min(1.0, max(self.value, used / max(total, 1)))

    def reset(self) -> None:
        """Start anew, as nothing runs."""
        self.value = self._initial
