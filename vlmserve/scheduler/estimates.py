"""What the scheduler expects: how long steps take, and how much of their output requests will use."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.scheduler.req import Req

_INITIAL_RATIO, _LEAST_RATIO, _DECAY_STEPS = 0.7, 0.1, 600
_STEPS_AHEAD = 20
_SMOOTH = 0.2
_MIN_SLICE_S = 0.002
_MIN_IDLE_SLICE_S = 0.05  # shorter slices are cut into smaller pieces, which cost more
_LEAST_CHANGE, _MOST_CHANGE = 0.5, 1.25
_MARGIN = 0.85
_LEAST_TOKENS = 16  # fewer cost about as much


class _ChunkSize:
    """The prompt tokens of a step that should take a given time. The number grows or shrinks as the last step was too
    short or too long, so it follows the length of prompts, batch mates, and a busy machine."""

    def __init__(self, tokens: float, least: int) -> None:
        self.tokens = tokens
        self._least = least

    def observe(self, tokens: int, seconds: float, target_s: float) -> None:
        """Note that a step of so many prompt tokens took so long."""
        change = min(max(_MARGIN * target_s / max(seconds, 1e-9), _LEAST_CHANGE), _MOST_CHANGE)
        if change < 1 or tokens >= self.tokens - self._least:  # a smaller chunk says nothing of a larger one
            self.tokens = max(min(self.tokens, tokens) * change, self._least)


class StepCosts:
    """Measures steps, and says how much fits into the next one.

    Between two tokens of running requests there is time for a chunk of a prompt or a slice of a picture's encoding;
    --max-decode-slowdown says how much time. If nothing decodes, a newcomer waits for one chunk or slice at the most,
    and these take no longer than --max-step-s.

    slowdown: --max-decode-slowdown, 0 for no limit. max_step_s: 0 for no limit.
    """

    def __init__(self, *, slowdown: float, max_step_s: float, page_size: int) -> None:
        self._slowdown = slowdown
        self._max_step_s = max_step_s
        self._decode_s: float | None = None
        least = max(_LEAST_TOKENS, page_size)
        self._beside = _ChunkSize(4 * least, least)
        self._alone = _ChunkSize(32 * least, least)

    def observe(self, *, prompt_tokens: int, decoding: int, beside: bool, seconds: float) -> None:
        """Note a step. decoding: how many requests got a token of it. beside: whether any request was decoding, in the
        step or not."""
        if not prompt_tokens:
            before = seconds if self._decode_s is None else self._decode_s
            self._decode_s = before + _SMOOTH * (seconds - before)
        elif beside:
            if self._slowdown and self._decode_s is not None:
                times = self._slowdown if decoding else self._slowdown - 1
                self._beside.observe(prompt_tokens, seconds, times * self._decode_s)
        elif self._max_step_s:
            self._alone.observe(prompt_tokens, seconds, self._max_step_s)

    def chunk_tokens(self, *, decoding: bool) -> int | None:
        """Return the most prompt tokens of the next step; None for no limit of this kind."""
        if decoding:
            return None if not self._slowdown else int(self._beside.tokens)
        return None if not self._max_step_s else int(self._alone.tokens)

    def slice_s(self, *, decoding: bool) -> float:
        """Return the seconds of encoding before the next step."""
        if not decoding:  # a newcomer waits for one slice: about as long as its own step takes
            most = self._max_step_s or float("inf")
            return most if self._decode_s is None else min(max(self._decode_s, _MIN_IDLE_SLICE_S), most)
        if not self._slowdown:
            return float("inf")
        return max(_MARGIN * (self._slowdown - 1) * (self._decode_s or 0.0), _MIN_SLICE_S)


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
