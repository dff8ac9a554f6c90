"""Token ids to text, as they come: whole UTF-8 characters, stop strings, special tokens.

A plain synchronous object: the served form runs it in its own process, the offline `LLM` calls it in place.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlmserve.ipc.messages import AbortReq, BatchTextOutput, BatchTokenOutput, FinishReason, TokenOutput
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True)
class _Answer:
    """The state of one answer: bytes of an incomplete character, and text that may be the start of a stop string.

    unmatched: the number of tokens to come in which no stop string is found. include_stop: the answer has the text of
    what ends it.
    """

    decoder: codecs.IncrementalDecoder
    matcher: StopMatcher
    skip_special_tokens: bool
    unmatched: int = 0
    include_stop: bool = False


class DetokenizerManager:
    """Turns each step's tokens into text deltas; state lives from a request's first output to its last.

    Because every id has exact bytes, a delta costs the new tokens' bytes only, and the deltas' concatenation is the
    decoding of all ids at once.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}

    @property
    def num_active(self) -> int:
        """Return the number of requests with state: zero when idle."""
        return len(self._answers)

    def process(self, batch: BatchTokenOutput) -> tuple[BatchTextOutput, list[AbortReq]]:
        """Return one step's deltas, and the aborts of requests that a stop string ended, for the scheduler.

        Outputs of a request that already ended are dropped: they were under way when its stop string was found.
        """
        texts: list[TokenOutput] = []
        aborts: list[AbortReq] = []
        for output in batch.outputs:
            answer = self._answer_of(output)
            if answer is None:
                # A request can fail before it has a first output; its client still waits for the news.
                if output.finish_reason is not None and output.finish_reason.type in ("abort", "error"):
                    texts.append(_with_text(output, "", 0, output.finish_reason))
                continue
            text, kept, finish = self._extend(answer, output)
            if finish is not None:
                self._answers.pop(output.rid, None)
                if output.finish_reason is None:
                    aborts.append(AbortReq(rid=output.rid, finished=True))
            texts.append(_with_text(output, text, kept, finish))
        return BatchTextOutput(outputs=tuple(texts)), aborts

    def forget(self, rid: str) -> None:
        """Free a request's state without a finish: it is lost."""
        self._answers.pop(rid, None)

    def _answer_of(self, output: TokenOutput) -> _Answer | None:
        if output.first:
            self._answers[output.rid] = _Answer(
                decoder=_Utf8Decoder("replace"),
                matcher=StopMatcher(output.stop, include=output.include_stop),
                skip_special_tokens=output.skip_special_tokens,
                unmatched=output.min_tokens,
                include_stop=output.include_stop,
            )
        return self._answers.get(output.rid)

    def _extend(self, answer: _Answer, output: TokenOutput) -> tuple[str, int, FinishReason | None]:
        """Return the new text, how many of the new tokens belong to the answer, and why it ends."""
        hidden = self._tokenizer.special_ids if answer.skip_special_tokens else frozenset()
        ids, finish = output.token_ids, output.finish_reason
        shown = len(ids)
        if finish is not None and finish.type == "stop" and ids and ids[-1] == finish.matched:
            finish = replace(finish, shown=answer.include_stop and ids[-1] not in hidden)
            shown -= not finish.shown
        parts: list[str] = []
        for index in range(shown):
            matching = answer.unmatched == 0
            answer.unmatched -= not matching
            if ids[index] in hidden:
                continue
            chars = answer.decoder.decode(self._tokenizer.token_bytes(ids[index]))
            if not chars:
                continue
            if not matching:
                parts.append(chars)
                continue
            text, matched = answer.matcher.feed(chars)
            parts.append(text)
            if matched is not None:
                return "".join(parts), index + 1, FinishReason(type="stop", matched=matched)
        if finish is not None:
            text, matched = answer.matcher.feed(answer.decoder.decode(b"", final=True))
            parts.append(text)
            if matched is not None:
                return "".join(parts), len(ids), FinishReason(type="stop", matched=matched)
            parts.append(answer.matcher.flush())
        return "".join(parts), len(ids), finish


def _with_text(output: TokenOutput, text: str, kept: int, finish: FinishReason | None) -> TokenOutput:
    """Make the output that goes to the API. kept: how many of the tokens belong to the answer."""
    right = len(output.token_ids) - 1  # of several tokens, all but the last were guessed
    return output._replace(
        text=text,
        token_ids=output.token_ids[:kept],
        finish_reason=finish,
        completion_tokens=output.completion_tokens - (len(output.token_ids) - kept),
        logprobs=None if output.logprobs is None else output.logprobs[:kept],
        guesses=output.guesses.without(range(kept, right)) if output.guesses and kept < right else output.guesses,
    )


def join_outputs(before: TokenOutput | None, output: TokenOutput) -> TokenOutput:
    """Join an answer so far and its next output."""
    if before is None:
        return output
    return output._replace(
        text=before.text + output.text,
        token_ids=before.token_ids + output.token_ids,
        logprobs=None if output.logprobs is None else (before.logprobs or ()) + output.logprobs,
        prompt_logprobs=before.prompt_logprobs,
        hidden_states=_joined(before.hidden_states, output.hidden_states),
        stages=output.stages or before.stages,
    )


def _joined(before: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray | None:
    return before if rows is None else rows if before is None else np.concatenate([before, rows])


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces and holds back what may be the start of one.

    The stop string that is complete first wins; of several complete at the same character the longest, which begins
    first. So the answer does not depend on how the text was cut into tokens or steps. Each string is followed by a
    Knuth-Morris-Pratt automaton: O(1) amortised per character and stop string, whatever the text repeats.

    include: the text that is returned has the stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._stops = [stop for stop in stops if stop]
        self._failures = [_failures(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is decided now, and the stop string that ended the answer, if one did.

        Feed nothing after a match. Text behind the match is dropped.
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(char)
            if matched is not None:
                self._held = ""
                return pending[: end if self._include else end - len(matched)], matched
        decided = len(pending) - max(self._lengths)
        self._held = pending[decided:]
        return pending[:decided], None

    def flush(self) -> str:
        """Return the text held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        matched: str | None = None
        for i, stop in enumerate(self._stops):
            length = self._lengths[i] = _step(stop, self._failures[i], self._lengths[i], char)
            if length == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
        return matched


def _step(pattern: str, failures: Sequence[int], length: int, char: str) -> int:
    """Return how much of the pattern matches after one more character."""
    while length and pattern[length] != char:
        length = failures[length - 1]
    return length + (pattern[length] == char)


def _failures(pattern: str) -> list[int]:
    """Return at [i] the length of the longest proper prefix of `pattern` that is also a suffix of pattern[: i + 1]."""
    failures = [0]
    for char in pattern[1:]:
        failures.append(_step(pattern, failures, failures[-1], char))
    return failures
