"""Stop strings, found character by character."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces and holds back what may be the start of one.

    The stop string that is complete first wins; of several complete at the same character the longest, which begins
    first. So the answer does not depend on how the text was cut into tokens or steps. Each string is followed by a
    Knuth-Morris-Pratt automaton: O(1) amortised per character and stop string, whatever the text repeats.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is now decided, and the stop string that ended the answer, if one did.

        After a match nothing may be fed any more; what came after the match is dropped.
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = self._advance(char)
            if matched is not None:
                self._held = ""
                return pending[: end - len(matched)], matched
        decided = len(pending) - max(self._lengths)
        self._held = pending[decided:]
        return pending[:decided], None

    def flush(self) -> str:
        """The text held back, when the answer ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        matched: str | None = None
        for i, stop in enumerate(self._stops):
            length, failure = self._lengths[i], self._failures[i]
            while length and stop[length] != char:
                length = failure[length - 1]
            length += stop[length] == char
            self._lengths[i] = length
            if length == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
        return matched


def _failure_function(pattern: str) -> list[int]:
    """failure[i]: length of the longest proper prefix of `pattern` that is also a suffix of pattern[: i + 1]."""
    failure = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = failure[length - 1]
        length += pattern[i] == pattern[length]
        failure[i] = length
    return failure
