"""A request's pictures: from references in its messages to patches in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from processors.base import ExpandedPrompt, MultimodalProcessor, ProcessedImage
from processors.pool import ImageRequest, ProcessorPool
from vlmserve.common.errors import BadRequestError
from vlmserve.tokenizer.chat_messages import ImageRef


class RequestMedia:
    """Loads what `ImageRef`s name through a processor pool, and expands prompts."""

    def __init__(self, processor: MultimodalProcessor, pool: ProcessorPool) -> None:
        self._processor = processor
        self._pool = pool

    async def load(self, images: Sequence[ImageRef]) -> list[ProcessedImage]:
        """Fetch, decode and resize, off the event loop. BadRequestError names the picture's place in the request."""
        return await self._pool.load([self._request(image) for image in images])

    def load_sync(self, images: Sequence[ImageRef]) -> list[ProcessedImage]:
        """`load` for the offline LLM, where a picture may also be a `Path`."""
        return self._pool.load_sync([self._request(image) for image in images])

    def process(self, prompt_ids: Sequence[int], images: Sequence[ProcessedImage]) -> ExpandedPrompt:
        """Put the pictures at their placeholders. BadRequestError if they do not match up."""
        return self._processor.expand(prompt_ids, images)

    def close(self) -> None:
        """End the pool's threads."""
        self._pool.close()

    def _request(self, image: ImageRef) -> ImageRequest:
        source = image.source
        try:
            knobs = self._processor.knobs_for_detail(image.detail)
            if isinstance(source, Path):
                source = source.read_bytes()
        except BadRequestError as error:
            error.param = image.param
            raise
        except OSError as error:
            raise BadRequestError(f"cannot read {source}: {error.strerror}", param=image.param) from None
        return ImageRequest(source=source, knobs=knobs, param=image.param)
