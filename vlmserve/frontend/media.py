"""A request's media: from references in its messages to patches in its prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from processors.families.base import ExpandedPrompt, MultimodalProcessor, ProcessedMedium
from processors.families.processor_kwargs import RequestKnobs
from processors.families.report import MediumReport, report_medium
from processors.knobs import check_image_knobs, laid_over
from processors.pool.pool import ProcessorPool
from processors.pool.requests import AudioRequest, EmbedsRequest, ImageRequest, MediaRequest, VideoRequest
from processors.processed import of_tenant
from processors.video.options import check_knobs
from vlmserve.frontend.chat_messages import (
    AudioRef,
    EmbedsRef,
    FindFile,
    ImageRef,
    MediaCounts,
    MediaRef,
    Message,
    VideoRef,
    settle_media,
    to_template_messages,
    with_files,
)
from vlmserve.frontend.live import LiveRules
from vlmserve_common.errors import BadRequestError

_LIVE_FPS = 2.0
_LIVE_TOKENS = 768  # of a frame at most, as the references have it for clips


class RequestMedia:
    """Loads what `MediaRef`s name through a processor pool, and expands prompts."""

    def __init__(self, processor: MultimodalProcessor, pool: ProcessorPool) -> None:
        self._processor = processor
        self._pool = pool

    @property
    def sees(self) -> bool:
        """Whether the model takes pictures and videos."""
        return self._processor.sees

    def check(self, media: Sequence[MediaRef]) -> None:
        """Raise BadRequestError for media that the model does not take."""
        if media and not self.sees:
            raise BadRequestError(
                f"{media[0].param}: the model reads text only, and takes no pictures and no videos",
                param=media[0].param,
                code="unsupported_content",
            )
        sound = next((medium for medium in media if isinstance(medium, AudioRef)), None)
        if sound is not None and not self._processor.hears:
            raise BadRequestError(
                f"{sound.param}: the model takes no sounds; models that do are Qwen2.5-Omni and Qwen3-Omni",
                param=sound.param,
                code="unsupported_content",
            )

    @property
    def pads(self) -> tuple[int, ...]:
        """The ids of the tokens that stand for media in a prompt."""
        return self._processor.token_ids.pads

    @property
    def merge_size(self) -> int:
        """Patches a side that become one token."""
        return self._processor.config.patches.merge_size

    @property
    def defaults(self) -> Mapping[str, float | None]:
        """See `MultimodalProcessor.defaults`."""
        return self._processor.defaults

    def live_rules(
        self,
        fps: float | None = None,
        *,
        keep_seconds: float | None = None,
        max_tokens: int | None = None,
        slides: bool = False,
    ) -> LiveRules:
        """Return how frames become a live video. fps: None for the usual frames a second of a clip. Raises
        BadRequestError for a model whose windows cannot slide."""
        if slides and not self._processor.can_slide:
            raise BadRequestError(
                'live.window is "sliding", which this model does not do: recurrent states, and positions of models '
                'that hear, are of all that came before; send "exact"',
                param="live.window",
                code="invalid_value",
            )
        patches = self._processor.config.video_patches
        return LiveRules(
            fps=fps or self.defaults["fps"] or _LIVE_FPS,
            depth=patches.temporal_patch_size,
            paced=self._processor.even_times,
            max_pixels=_LIVE_TOKENS * patches.factor**2,
            keep_seconds=keep_seconds,
            max_tokens=max_tokens,
            positions_of=self._processor.positions_of if slides else None,
        )

    def parse_kwargs(self, given: Mapping[str, Any]) -> RequestKnobs:
        """Parse a request's `mm_processor_kwargs`. Raises BadRequestError for unknown keys and impossible values."""
        return self._processor.parse_kwargs(given)

    def media_of(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Any],
        most: MediaCounts,
        find_file: FindFile | None = None,
    ) -> list[MediaRef]:
        """Return the media of a conversation that can be encoded ahead of time; its text does not matter.

        kwargs: the request's `mm_processor_kwargs`. Raises BadRequestError, for media that come encoded, too.
        """
        media = self.named_in(messages, kwargs, most, find_file)
        for ref in media:
            if isinstance(ref, EmbedsRef):
                what = f"{ref.param} comes encoded: there is nothing to encode ahead of time"
                raise BadRequestError(what, param=ref.param, code="unsupported_content")
        return media

    def named_in(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Any],
        most: MediaCounts,
        find_file: FindFile | None = None,
        *,
        reserved: Collection[str] = (),
    ) -> list[MediaRef]:
        """Return all media of a conversation. reserved: as of `to_template_messages`. Raises BadRequestError."""
        _, media = to_template_messages(with_files(messages, find_file), reserved=reserved)
        self.check(media)
        return settle_media(media, self.parse_kwargs(kwargs) if kwargs else None, most)

    async def load(
        self,
        media: Sequence[MediaRef],
        *,
        client: str = "",
        tenant: str = "",
        fetched: Callable[[], None] = lambda: None,
    ) -> list[ProcessedMedium]:
        """Fetch, decode and resize, off the event loop. BadRequestError names the medium's place in the request. Media
        that a session holds are there already.

        client: its id; clients take turns. tenant: only its own media are shared with these, here and in all caches
        behind; "" is a tenant, too. fetched: called for each medium whose bytes have arrived.
        """
        new = [medium for medium in media if not isinstance(medium.source, ProcessedMedium)]
        requests = [replace(self._request(medium), tenant=tenant) for medium in new]
        loaded = iter(await self._pool.load(requests, client=client, fetched=fetched))

        def done(medium: MediaRef) -> ProcessedMedium:
            if isinstance(medium.source, ProcessedMedium):
                return medium.source
            return of_tenant(next(loaded), tenant) if tenant else next(loaded)

        return [done(medium) for medium in media]

    def process(self, prompt_ids: Sequence[int], media: Sequence[ProcessedMedium]) -> ExpandedPrompt:
        """Put the media at their placeholders. BadRequestError if they do not match up."""
        return self._processor.expand(prompt_ids, media)

    def report(self, media: Sequence[MediaRef], processed: Sequence[ProcessedMedium]) -> tuple[MediumReport, ...]:
        """Report the outcome for each medium."""
        pairs = zip(media, processed, strict=True)
        return tuple(report_medium(self._processor, done, medium.param) for medium, done in pairs)

    def describe_settings(self) -> str:
        """Return a text that changes with every setting that may turn the same medium into other patches."""
        processor = self._processor
        return f"{type(processor).__name__} {processor.config} {processor.limits}"

    async def close(self) -> None:
        """End the pool, in the event loop that it is used in, or in any loop if it is used in none."""
        await self._pool.close()

    def _request(self, medium: MediaRef) -> MediaRequest:
        try:
            source = _read(medium.source)
            if isinstance(medium, EmbedsRef):
                return EmbedsRequest(source=source, param=medium.param, modality=medium.modality)
            if isinstance(medium, ImageRef):
                check_image_knobs(medium.knobs)
                detail = laid_over(self._processor.sizes.knobs_for_detail(medium.detail), medium.defaults)
                return ImageRequest(source=source, knobs=laid_over(medium.knobs, detail), param=medium.param)
            if isinstance(medium, AudioRef):
                return AudioRequest(source=source, param=medium.param)
            check_knobs(medium.knobs)
            return VideoRequest(source=source, knobs=medium.asked, param=medium.param)
        except BadRequestError as error:
            error.param = medium.param
            raise


def _read(source: Any) -> Any:
    """Replace a path by the bytes of its file."""
    if isinstance(source, tuple):
        return tuple(map(_read, source))
    if not isinstance(source, Path):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise BadRequestError(f"cannot read {str(source)!r}: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise BadRequestError(f"cannot read {str(source)!r}: {error}") from None


def same_media(some: Sequence[MediaRef], others: Sequence[MediaRef]) -> bool:
    """Return whether two requests name the same media, prepared alike, at whatever places."""
    return len(some) == len(others) and all(
        type(one) is type(other)
        and (one.source is other.source or (isinstance(one.source, str) and one.source == other.source))
        and replace(one, source=None, param="") == replace(other, source=None, param="")
        and (not isinstance(one, VideoRef) or not isinstance(other, VideoRef) or one.asked == other.asked)
        for one, other in zip(some, others, strict=True)
    )
