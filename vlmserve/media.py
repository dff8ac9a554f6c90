"""A request's pictures: from references in its messages to patches in its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from processors.base import MultimodalProcessor, ProcessedImage
from processors.inputs import MultimodalInputs
from processors.pool import ImageRequest, ProcessorPool
from vlmserve.common.errors import BadRequestError
from vlmserve.tokenizer.chat_messages import ImageRef


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandedPrompt:
    """input_ids int64 [L] with the pad tokens of all media, and the media; None for text alone."""

    input_ids: np.ndarray
    mm_inputs: MultimodalInputs | None


class RequestMedia:
    """Loads what `ImageRef`s name through a processor pool, and expands prompts: the `MediaLoader` and
    `PromptExpander` of the tokenizer stage."""

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
        input_ids, mm_inputs = self._processor.expand(prompt_ids, images)
        return ExpandedPrompt(input_ids=input_ids, mm_inputs=mm_inputs)

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
