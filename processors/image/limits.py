"""How large a picture may be, and how its refusal is worded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from processors.image.formats import INVALID_IMAGE
from processors.resize import MAX_ASPECT_RATIO
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """max_image_pixels: the most pixels (width * height) of a picture as it comes, before any resizing."""

    max_image_pixels: int = 64 * 10**6

    @property
    def max_side(self) -> int:
        """The longest side, in pixels, of a picture of that many pixels and the most extreme shape that is resized.

        Pillow keeps a pointer for each row, and decoders work by rows: thin pictures cost far more than their pixels.
        """
        return math.isqrt(self.max_image_pixels * MAX_ASPECT_RATIO)


def check_size(width: int, height: int, limits: DecodeLimits, what: str = "picture") -> None:
    """Raises BadRequestError for a `what` of no pixels, of too many, or with too long a side (in pixels)."""
    if width < 1 or height < 1:
        raise BadRequestError(f"the picture has no pixels ({width}x{height})", code=INVALID_IMAGE)
    if width * height > limits.max_image_pixels:
        raise too_large(f"{what} of {width}x{height} = {width * height} pixels", limits)
    if max(width, height) > limits.max_side:
        raise BadRequestError(
            f"a {what} of {width}x{height} pixels: its longer side may be {limits.max_side} pixels, "
            f"those of {limits.max_image_pixels} pixels (setting --max-image-pixels) at {MAX_ASPECT_RATIO}:1",
            code="image_too_large",
        )


def too_large(what: str, limits: DecodeLimits) -> BadRequestError:
    """A picture (`what`) that has more pixels than the setting allows."""
    return BadRequestError(
        f"a {what}; the limit is {limits.max_image_pixels} (setting --max-image-pixels)", code="image_too_large"
    )


def check_count(format: str, what: str, count: int, most: int) -> None:
    """Raises BadRequestError where a file has more of something than ordinary ones, at a cost to whoever reads it."""
    if count > most:
        raise BadRequestError(
            f"the {format} picture has {count} {what}, the limit is {most}; save it anew", code=INVALID_IMAGE
        )
