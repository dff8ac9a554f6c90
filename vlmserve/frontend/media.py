"""A request's pictures and videos: from references in its messages to patches in its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from processors.families.base import ExpandedPrompt, MultimodalProcessor, ProcessedMedium
from processors.families.processor_kwargs import RequestKnobs
from processors.families.report import MediumReport, report_medium
from processors.knobs import check_image_knobs, laid_over
from processors.pool.pool import ProcessorPool
from processors.pool.requests import EmbedsRequest, ImageRequest, MediaRequest, VideoRequest
from processors.processed import of_tenant
from processors.video.options import check_knobs
from vlmserve.frontend.chat_messages import (
    EmbedsRef,
    FindFile,
    ImageRef,
    MediaCounts,
    MediaRef,
    Message,
    settle_media,
    to_template_messages,
    with_files,
)
from vlmserve_common.errors import BadRequestError


class RequestMedia:
    """Loads what `MediaRef`s name through a processor pool, and expands prompts."""

    def __init__(self, processor: MultimodalProcessor, pool: ProcessorPool) -> None:
        self._processor = processor
        self._pool = pool

    @property
    def defaults(self) -> Mapping[str, float | None]:
        """See `MultimodalProcessor.defaults`."""
        return self._processor.defaults

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
        _, media = to_template_messages(with_files(messages, find_file))
        for ref in media:
            if isinstance(ref, EmbedsRef):
                what = f"{ref.param} comes encoded: there is nothing to encode ahead of time"
                raise BadRequestError(what, param=ref.param, code="unsupported_content")
        return settle_media(media, self.parse_kwargs(kwargs) if kwargs else None, most)

    async def load(
        self,
        media: Sequence[MediaRef],
        *,
        client: str = "",
        tenant: str = "",
        fetched: Callable[[], None] = lambda: None,
    ) -> list[ProcessedMedium]:
        """Fetch, decode and resize, off the event loop. BadRequestError names the medium's place in the request.

        client: its id; clients take turns. tenant: only its own media are shared with these, here and in all caches
        behind; "" is a tenant, too. fetched: called for each medium whose bytes have arrived.
        """
        requests = [replace(self._request(medium), tenant=tenant) for medium in media]
        loaded = await self._pool.load(requests, client=client, fetched=fetched)
        return [of_tenant(medium, tenant) for medium in loaded] if tenant else loaded

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
            check_knobs(medium.knobs)
            knobs = laid_over(medium.knobs, medium.defaults)
            return VideoRequest(source=source, knobs=knobs, param=medium.param)
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
        for one, other in zip(some, others, strict=True)
    )
