"""Computes a picture's resized size: the checkpoint's area limits, changed by a request, within the server's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from processors.knobs import Clamp, ImageKnobs, areas_without_effect, at_most, check_image_knobs
from processors.resize import smart_resize
from vlmserve_common.errors import BadRequestError

MAX_PIXELS_SETTING = "setting --max-pixels"
AUTO_PIXELS_SETTING = "setting --max-pixels auto"
# `IMAGE_MIN_TOKEN_NUM` of qwen_vl_utils
_LEAST_TOKENS = 4


class FittedSize(NamedTuple):
    """A size in pixels, and the values that server limits changed on the way to it."""

    height: int
    width: int
    clamps: tuple[Clamp, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSizes:
    """Size limits of a checkpoint's pictures.

    `factor`: pixels a side of a token. `min_pixels`, `max_pixels`: the checkpoint's area limits. `limit`: the largest
    area that a request can get; None for the checkpoint's. `low_detail_tokens`: for detail "low". `tell_limit`: see
    `ProcessorLimits`.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    limit: int | None
    low_detail_tokens: int
    tell_limit: bool = False

    @property
    def highest(self) -> int:
        """The largest area that a request can ask for, in pixels."""
        return self.max_pixels if self.limit is None else self.limit

    def fit(self, height: int, width: int, knobs: ImageKnobs) -> FittedSize:
        """Return the resized size of a picture of height x width. Raises BadRequestError for bad knobs or sides."""
        check_image_knobs(knobs)
        if knobs.resized_height is not None and knobs.resized_width is not None:
            return aimed_size(
                knobs.resized_height,
                knobs.resized_width,
                factor=self.factor,
                limit=self.highest,
                setting=MAX_PIXELS_SETTING,
            )
        limits = ((self.highest, MAX_PIXELS_SETTING),)
        found: list[Clamp] = []
        # A limit that was asked for pushes the default of the other one aside.
        asked = at_most("max_pixels", knobs.max_pixels, limits, found)
        high = min(self.max_pixels, self.highest) if asked is None else asked
        low = at_most("min_pixels", knobs.min_pixels, limits, found)
        if low is None:
            low = min(self.min_pixels, high)
        high = max(low, high)
        size = smart_resize(height, width, factor=self.factor, min_pixels=low, max_pixels=high)
        if self.tell_limit and high == self.highest and not found:
            most = max(self.max_pixels, high)
            free = smart_resize(height, width, factor=self.factor, min_pixels=low, max_pixels=most)
            found += told_scaling(free, size, high)
        return FittedSize(*size, tuple(found))

    def ignored(self, knobs: ImageKnobs) -> tuple[str, ...]:
        return areas_without_effect(knobs)

    def knobs_for_detail(self, detail: str | None) -> ImageKnobs:
        """Translate OpenAI's `detail`: "low" is a few tokens, "high" is all that the server allows. "auto" and None set
        nothing.

        Raises BadRequestError for another word.
        """
        if detail in (None, "auto"):
            return ImageKnobs()
        if detail == "high":
            return ImageKnobs(max_pixels=self.highest)
        if detail == "low":
            low = self.low_detail_tokens * self.factor**2
            return ImageKnobs(max_pixels=min(low, self.max_pixels, self.highest))
        raise BadRequestError(f"detail {detail!r} is none of 'auto', 'low' and 'high'", code="invalid_value")


def told_scaling(free: tuple[int, int], size: tuple[int, int], limit: int) -> tuple[Clamp, ...]:
    """Report a limit that the server chose itself. `free`: the (height, width) without the limit. Returns () if it is
    no larger."""
    asked, used = free[0] * free[1], size[0] * size[1]
    if asked <= used:
        return ()
    return (Clamp(knob="max_pixels", asked=asked, used=used, limit=limit, setting=AUTO_PIXELS_SETTING),)


def aimed_size(height: int, width: int, *, factor: int, limit: int, setting: str) -> FittedSize:
    """Return the size for a requested one: whole tokens, at least 4 tokens, and at most `limit` pixels. Raises
    BadRequestError.

    `fetch_image` and `fetch_video` of qwen_vl_utils do the same, with a limit of 16384 tokens.
    """
    least = min(_LEAST_TOKENS * factor**2, limit)
    unlimited = (height + factor) * (width + factor)
    asked, used = (
        smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most, least_side=factor)
        for most in (max(unlimited, least), limit)
    )
    if asked == used:
        return FittedSize(*used)
    sides = zip(("resized_height", "resized_width"), (height, width), used, strict=True)
    return FittedSize(*used, tuple(Clamp(knob=k, asked=a, used=u, limit=limit, setting=setting) for k, a, u in sides))
