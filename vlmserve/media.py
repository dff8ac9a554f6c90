"""A request's pictures and videos: from references in its messages to patches in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processors.base import ExpandedPrompt, MultimodalProcessor, ProcessedMedium
from processors.pool import ImageRequest, MediaRequest, ProcessorPool, VideoRequest
from vlmserve.common.errors import BadRequestError
from vlmserve.tokenizer.chat_messages import ImageRef, MediaRef


class RequestMedia:
    """Loads what `MediaRef`s name through a processor pool, and expands prompts."""

    def __init__(self, processor: MultimodalProcessor, pool: ProcessorPool) -> None:
        self._processor = processor
        self._pool = pool

    async def load(self, media: Sequence[MediaRef]) -> list[ProcessedMedium]:
        """Fetch, decode and resize, off the event loop. BadRequestError names the medium's place in the request."""
        return await self._pool.load([self._request(medium) for medium in media])

    def load_sync(self, media: Sequence[MediaRef]) -> list[ProcessedMedium]:
        """`load` for the offline LLM, where a file may also be named by a `Path`."""
        return self._pool.load_sync([self._request(medium) for medium in media])

    def process(self, prompt_ids: Sequence[int], media: Sequence[ProcessedMedium]) -> ExpandedPrompt:
        """Put the media at their placeholders. BadRequestError if they do not match up."""
        return self._processor.expand(prompt_ids, media)

    def close(self) -> None:
        """End the pool's threads."""
        self._pool.close()

    def _request(self, medium: MediaRef) -> MediaRequest:
        try:
            source = _read(medium.source)
            if isinstance(medium, ImageRef):
                knobs = self._processor.knobs_for_detail(medium.detail)
                return ImageRequest(source=source, knobs=knobs, param=medium.param)
            return VideoRequest(source=source, knobs=medium.knobs, param=medium.param)
        except BadRequestError as error:
            error.param = medium.param
            raise


def _read(source: Any) -> Any:
    """Files that are named by a path become their bytes."""
    if isinstance(source, tuple):
        return tuple(map(_read, source))
    if not isinstance(source, Path):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise BadRequestError(f"cannot read {source}: {error.strerror}") from None
