"""What a run has come to so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vlmserve.caption.result import Captioned


@dataclass
class Tally:
    """Of items. total: how many there are, as far as they have been counted; counted: whether that is all of them.

    done: captioned by the model. reused: the same as another item, whose caption they got. skipped: finished by a run
    before. failed: in this run. failed_before: in one before, and not tried again. repeated: named twice.
    prompt_tokens, completion_tokens: of answers. cached_tokens: of prompts, found in the prefix cache.
    """

    total: int = 0
    counted: bool = False
    done: int = 0
    reused: int = 0
    skipped: int = 0
    failed: int = 0
    failed_before: int = 0
    repeated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def passed(self) -> int:
        """Items that need no more attention."""
        return self.done + self.reused + self.skipped + self.failed + self.failed_before + self.repeated

    @property
    def worked_on(self) -> int:
        """Items that this run has finished, for better or worse."""
        return self.done + self.reused + self.failed

    def add(self, results: Iterable[Captioned]) -> None:
        """These are finished, and on disk."""
        for result in results:
            if result.usage is None:
                self.reused += 1
                continue
            self.done += 1
            self.prompt_tokens += result.usage.get("prompt_tokens") or 0
            self.completion_tokens += result.usage.get("completion_tokens") or 0
            details = result.usage.get("prompt_tokens_details") or {}
            self.cached_tokens += details.get("cached_tokens") or 0
