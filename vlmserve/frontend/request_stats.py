"""Figures of an answer for metrics, logs and traces: its outcome, its tokens, and its times from arrival to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from processors.families.report import MediumReport
from vlmserve.ipc.messages import StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Times of an answer in seconds. A stage is None if the request skipped it or has not reached it.

    prepare_s: from arrival until the request goes to the scheduler, its media decoded and resized. fetch_s is the part
    until the last medium is fetched; preprocess_s is the rest: decoding, resizing and copying patches.
    first_token_s: from arrival to the first output. total_s: to the last one.
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
    """Moments of a request on the API process's clock. load_began: its media begin to load. fetched: the last is
    there."""

    started: float
    load_began: float | None = None
    fetched: float | None = None
    prepared: float | None = None


@dataclass(slots=True)
class AnswerTimes:
    """The times of one answer while it is made: moments of its request and its outputs, and the scheduler's stages."""

    moments: Moments
    first: float | None = None
    latest: float | None = None
    _stages: StageTimes | None = None
    _on_the_way: float = 0.0

    def output(self, now: float, stages: StageTimes | None, *, tokens: int) -> float | None:
        """Note an output with so many tokens. Returns the seconds since the tokens before; None for the first
        tokens."""
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
        """Return the times until now. ended_here: the end was found here and not by the scheduler, as with a stop
        string."""
        moments, stages = self.moments, self._stages
        prepared = now if moments.prepared is None else moments.prepared
        at_scheduler: dict[str, Any] = {} if stages is None else asdict(stages)
        at_scheduler.pop("total_s", None)
        if stages is not None:
            at_scheduler["queue_s"] += self._on_the_way
            if ended_here and stages.decode_s is not None and self.first is not None:
                at_scheduler["decode_s"] = now - self.first
        fetch_s = preprocess_s = None
        if moments.load_began is not None and moments.fetched is not None:
            fetch_s, preprocess_s = moments.fetched - moments.load_began, prepared - moments.fetched
        return Timings(
            prepare_s=prepared - moments.started,
            first_token_s=None if self.first is None else self.first - moments.started,
            fetch_s=fetch_s,
            preprocess_s=preprocess_s,
            total_s=now - moments.started,
            **at_scheduler,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTotals:
    """The number of pictures, videos, sounds and vision patches of a request, and how many tokens left its media. A
    token of a sound counts as the patches of a picture's token."""

    images: int = 0
    videos: int = 0
    audios: int = 0
    patches: int = 0
    pruned_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStats:
    """The outcome of one choice, in tokens and seconds. rid: the engine's id of the answer, as in logs.

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
        """Return the mean time between tokens after the first."""
        first = self.timings.first_token_s
        if first is None or self.completion_tokens < 2:
            return None
        return (self.timings.total_s - first) / (self.completion_tokens - 1)


def count_media(media: Sequence[MediumReport]) -> MediaTotals:
    """Count the media that a request's reports are about."""
    return MediaTotals(
        images=sum(medium.kind == "image" for medium in media),
        videos=sum(medium.kind == "video" for medium in media),
        audios=sum(medium.kind == "audio" for medium in media),
        patches=sum(medium.patches for medium in media),
        pruned_tokens=sum(medium.pruned_tokens for medium in media),
    )
