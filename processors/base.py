"""What every family's processor does: one picture to patches, and a prompt with placeholders to engine input.

The two are apart on purpose. `process_image` is the expensive half (it runs in `processors.pool`'s threads, its results
are cached by content), `expand` the cheap one that needs the whole request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from PIL import Image

from processors.config import ProcessorConfig, TokenIds
from processors.decoding import DecodeLimits, normalize_image
from processors.hashing import media_digest
from processors.inputs import Modality, MultimodalDataItem, MultimodalInputs
from processors.mrope import MediaSpan, mrope_positions
from processors.resize import frames_to_patches, resize_frames, smart_resize
from vlmserve.common.errors import BadRequestError

_LOW_DETAIL_PIXELS = 512 * 512


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageKnobs:
    """How one picture shall be resized, other than by the checkpoint's settings. All in pixels; None keeps the default.

    min_pixels, max_pixels: area limits. resized_height, resized_width: a size to aim at (both or neither); it is still
    rounded to whole tokens and kept within the area limits.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorLimits:
    """Server-side limits. max_pixels: the largest area a picture is resized to; None: the checkpoint's own maximum."""

    decode: DecodeLimits = field(default_factory=DecodeLimits)
    max_pixels: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedImage:
    """One picture, ready for the vision tower.

    digest, grid_thw, feature: as in `MultimodalDataItem`; feature is read-only, for it may be shared by requests.
    num_tokens: pad tokens it takes in a prompt. source_size: (width, height) of the upright picture as it came.
    """

    digest: bytes
    grid_thw: tuple[int, int, int]
    feature: np.ndarray
    num_tokens: int
    source_size: tuple[int, int]


class ExpandedPrompt(NamedTuple):
    """input_ids: int64 [L], each placeholder expanded to its pad tokens. mm_inputs: None for a prompt without media."""

    input_ids: np.ndarray
    mm_inputs: MultimodalInputs | None


class MultimodalProcessor(ABC):
    """Pictures and prompts of one checkpoint. Stateless after construction, so any number of threads may use it."""

    def __init__(self, config: ProcessorConfig, limits: ProcessorLimits) -> None:
        self.config = config
        self.limits = limits

    @abstractmethod
    def time_interval(self, item: MultimodalDataItem) -> float:
        """M-RoPE positions between two temporal patches of `item`."""

    @property
    def token_ids(self) -> TokenIds:
        """Ids of the media tokens."""
        return self.config.token_ids

    @property
    def max_pixels(self) -> int:
        """The largest area, in pixels, that a picture is resized to unless its knobs ask for less."""
        cap = self.limits.max_pixels
        return self.config.max_pixels if cap is None else min(cap, self.config.max_pixels)

    def resized_size(self, height: int, width: int, knobs: ImageKnobs | None = None) -> tuple[int, int]:
        """The (height, width) in pixels that a picture is resized to. Raises BadRequestError for bad knobs or sides."""
        knobs = knobs or ImageKnobs()
        min_pixels, max_pixels = self._budget(knobs)
        if knobs.resized_height is not None and knobs.resized_width is not None:
            height, width = knobs.resized_height, knobs.resized_width
        return smart_resize(
            height, width, factor=self.config.patches.factor, min_pixels=min_pixels, max_pixels=max_pixels
        )

    def num_image_tokens(self, height: int, width: int, knobs: ImageKnobs | None = None) -> int:
        """Pad tokens of a picture of that size, without touching any pixels."""
        new_height, new_width = self.resized_size(height, width, knobs)
        return new_height * new_width // self.config.patches.factor**2

    def knobs_for_detail(self, detail: str | None) -> ImageKnobs | None:
        """OpenAI's `detail`: "low" is a budget of 512x512 pixels; "high", "auto" and None are the checkpoint's own.

        Raises BadRequestError for another word.
        """
        if detail in (None, "auto", "high"):
            return None
        if detail == "low":
            return ImageKnobs(max_pixels=min(self.max_pixels, max(self.config.min_pixels, _LOW_DETAIL_PIXELS)))
        raise BadRequestError(f"detail {detail!r} is none of 'auto', 'low' and 'high'", code="invalid_value")

    def process_image(self, image: Image.Image, knobs: ImageKnobs | None = None) -> ProcessedImage:
        """Bring one picture upright, to RGB and to size, and cut it into patches. Raises BadRequestError."""
        rgb = normalize_image(image, self.limits.decode)
        height, width = self.resized_size(rgb.height, rgb.width, knobs)
        patches = self.config.patches
        pixels = resize_frames(np.array(rgb)[None], height, width, patches.resample)
        feature, grid = frames_to_patches(pixels, patches)
        feature.flags.writeable = False
        return ProcessedImage(
            digest=media_digest(Modality.IMAGE, grid, feature),
            grid_thw=grid,
            feature=feature,
            num_tokens=self._num_tokens(grid),
            source_size=rgb.size,
        )

    def expand(self, prompt_ids: Sequence[int] | np.ndarray, images: Sequence[ProcessedImage]) -> ExpandedPrompt:
        """Put each picture's pad tokens in the place of its single placeholder, in prompt order.

        prompt_ids: the tokenized prompt, one image pad id per picture. Raises BadRequestError when placeholders and
        pictures do not match up.
        """
        ids = np.asarray(prompt_ids, np.int64)
        if (ids == self.token_ids.video_pad).any():
            raise BadRequestError("video is not supported yet, the prompt holds a video placeholder", code="no_video")
        places = np.flatnonzero(ids == self.token_ids.image_pad)
        if len(places) != len(images):
            raise BadRequestError(
                f"the prompt text contains {len(places)} image placeholder{'s' * (len(places) != 1)} but the request "
                f"has {len(images)} picture{'s' * (len(images) != 1)}: each picture needs exactly one, which the chat "
                "template writes",
                code="placeholder_mismatch",
            )
        if not images:
            return ExpandedPrompt(ids, None)
        lengths = np.ones(len(ids), np.int64)
        lengths[places] = [image.num_tokens for image in images]
        input_ids = np.repeat(ids, lengths)
        starts = (np.cumsum(lengths) - lengths)[places].tolist()
        items = tuple(
            MultimodalDataItem(
                modality=Modality.IMAGE,
                digest=image.digest,
                grid_thw=image.grid_thw,
                offsets=((start, start + image.num_tokens),),
                feature=image.feature,
            )
            for start, image in zip(starts, images, strict=True)
        )
        positions, delta = self.positions(len(input_ids), items)
        media = MultimodalInputs(items=items, mrope_positions=positions, mrope_position_delta=delta)
        return ExpandedPrompt(input_ids, media)

    def process(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        images: Sequence[Image.Image | ProcessedImage] = (),
        knobs: ImageKnobs | None = None,
    ) -> ExpandedPrompt:
        """`process_image` for each picture that is not processed yet, then `expand`."""
        done = [x if isinstance(x, ProcessedImage) else self.process_image(x, knobs) for x in images]
        return self.expand(prompt_ids, done)

    def positions(self, length: int, items: Sequence[MultimodalDataItem]) -> tuple[np.ndarray, int]:
        """M-RoPE positions int64 [3, length] and delta of an expanded prompt that holds `items`, in prompt order.

        An item in one range is one block; one in several ranges (a Qwen3-VL video) has a temporal patch in each.
        """
        merge = self.config.patches.merge_size
        spans = []
        for item in items:
            t, h, w = item.grid_thw
            grid = (t // len(item.offsets), h // merge, w // merge)
            interval = self.time_interval(item)
            for start, end in item.offsets:
                span = MediaSpan(start=start, grid=grid, time_interval=interval)
                if span.end != end:
                    raise ValueError(f"range [{start}, {end}) of a media item does not hold a grid of {grid}")
                spans.append(span)
        return mrope_positions(length, spans)

    def _num_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * grid[1] * grid[2] // self.config.patches.merge_size**2

    def _budget(self, knobs: ImageKnobs) -> tuple[int, int]:
        """Checked area limits (min_pixels, max_pixels) of one picture."""
        for name in ("min_pixels", "max_pixels", "resized_height", "resized_width"):
            value = getattr(knobs, name)
            if value is not None and (type(value) is not int or value < 1):
                raise BadRequestError(f"{name} {value!r} is not a positive integer", code="invalid_value")
            if value is not None and value > self.max_pixels:
                raise BadRequestError(
                    f"{name} {value} exceeds the server's limit of {self.max_pixels} pixels (setting --max-pixels)",
                    code="invalid_value",
                )
        if (knobs.resized_height is None) != (knobs.resized_width is None):
            raise BadRequestError("resized_height and resized_width must be given together", code="invalid_value")
        min_pixels, max_pixels = knobs.min_pixels, knobs.max_pixels
        if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
            raise BadRequestError(f"min_pixels {min_pixels} exceeds max_pixels {max_pixels}", code="invalid_value")
        # A limit that was asked for pushes the default of the other one aside.
        highest = self.max_pixels if max_pixels is None else max_pixels
        return min(self.config.min_pixels, highest) if min_pixels is None else min_pixels, highest
