"""Where an answer's time went, from its request's arrival: the API process's moments and the scheduler's stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from processors.families.report import MediumReport
from vlmserve.ipc.messages import StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds; None for stages that a request had no need of, or has not come to.

    prepare_s: from its arrival until it went to the scheduler, its media decoded and resized. Of that, fetch_s: until
    the last of its media had been fetched; preprocess_s: from then on, decoding, resizing and copying patches.
    first_token_s: from its arrival to the first output. total_s: to the last.
    queue_s, encode_s, encode_cached, prefill_s, decode_s, retractions: see `StageTimes`; queue_s includes the ways
    between the processes.
    """

    prepare_s: float
    first_token_s: float | None = None
    fetch_s: float | None = None
    preprocess_s: float | None = None
    queue_s: float | None = None
    encode_s: float | None = None
    encode_cached: bool | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float
    retractions: int = 0


@dataclass(slots=True)
class Moments:
    """Of a request, by the API process's clock. load_began, fetched: of its media, the last of them; None without."""

    started: float
    load_began: float | None = None
    fetched: float | None = None
    prepared: float | None = None


@dataclass(slots=True)
class AnswerTimes:
    """Of one answer: its request's moments, those of its first and latest output, and what the scheduler tells."""

    moments: Moments
    first: float | None = None
    latest: float | None = None
    _stages: StageTimes | None = None
    _on_the_way: float = 0.0

    def output(self, now: float, stages: StageTimes | None, *, tokens: int) -> float | None:
        """An output with so many tokens came; the seconds since those before, None for the first ones and for none."""
        self._stages = stages or self._stages
        if not tokens:
            return None
        before, self.latest = self.latest, now
        if before is not None:
            return now - before
        self.first = now
        if stages is not None and self.moments.prepared is not None:
            self._on_the_way = max(0.0, now - self.moments.prepared - stages.total_s)
        return None

    def timings(self, now: float, *, ended_here: bool = False) -> Timings:
        """Until now. ended_here: the scheduler did not tell of the end, as with a stop string."""
        moments, stages = self.moments, self._stages
        prepared = now if moments.prepared is None else moments.prepared
        fetch_s = preprocess_s = None
        if moments.load_began is not None and moments.fetched is not None:
            fetch_s, preprocess_s = moments.fetched - moments.load_began, prepared - moments.fetched
        here = Timings(
            prepare_s=prepared - moments.started,
            first_token_s=None if self.first is None else self.first - moments.started,
            fetch_s=fetch_s,
            preprocess_s=preprocess_s,
            total_s=now - moments.started,
        )
        if stages is None:
            return here
        decode_s = stages.decode_s
        if ended_here and decode_s is not None and self.first is not None:
            decode_s = now - self.first
        return replace(
            here,
            queue_s=stages.queue_s + self._on_the_way,
            encode_s=stages.encode_s,
            encode_cached=stages.encode_cached,
            prefill_s=stages.prefill_s,
            decode_s=decode_s,
            retractions=stages.retractions,
        )


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
