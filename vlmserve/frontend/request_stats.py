"""What became of a request, in plain figures, for metrics, logs and traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from processors.families.report import MediumReport
from vlmserve.frontend.timings import Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTotals:
    """Pictures and videos of a request, and the vision patches that both come to."""

    images: int = 0
    videos: int = 0
    patches: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStats:
    """What became of one choice, in tokens and seconds. rid: of the choice, as logs have it.

    finish: "stop", "length", "abort" or "error"; status: of an error. prompt_tokens, cached_tokens and media are given
    for choice 0 only, so that sums count a prompt once.
    """

    rid: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    status: int | None = None
    media: MediaTotals = MediaTotals()

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean time between tokens after the first."""
        first = self.timings.first_token_s
        if first is None or self.completion_tokens < 2:
            return None
        return (self.timings.total_s - first) / (self.completion_tokens - 1)


def count_media(media: Sequence[MediumReport]) -> MediaTotals:
    """Of a request's reports."""
    return MediaTotals(
        images=sum(medium.kind == "image" for medium in media),
        videos=sum(medium.kind == "video" for medium in media),
        patches=sum(math.prod(medium.grid_thw) for medium in media),
    )
