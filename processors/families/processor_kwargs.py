"""Parses `mm_processor_kwargs`: what one request says to the checkpoint's processors about all its pictures and videos.

Keys and meanings are transformers'. A key that transformers has for one kind of media is ignored for the other kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from processors.knobs import ImageKnobs, check_consistent, check_count, check_image_knobs, shown
from processors.video.options import VideoDefaults, VideoKnobs, check_knobs
from vlmserve_common.errors import BadRequestError

_FIELD = "mm_processor_kwargs"
_SIZE = ("shortest_edge", "longest_edge")
_AREAS = ("min_pixels", "max_pixels", "size")
_IMAGES = (*_AREAS, "skip_repeats")
_SAMPLING = ("fps", "num_frames", "min_frames", "max_frames", "total_pixels", "do_sample_frames")
_PRUNING = ("skip_repeats", "video_pruning_rate")
_SOUND = "use_audio_in_video"
_VIDEOS = (*_AREAS, *_SAMPLING, "cap_pixels_per_frame", *_PRUNING, "sampling", _SOUND)
_NESTED = {"images_kwargs": _IMAGES, "videos_kwargs": _VIDEOS}
_FLAGS = ("do_sample_frames", "cap_pixels_per_frame", _SOUND)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKnobs:
    """Defaults that one request sets for its message parts. `image`: for pictures. `video`: for videos."""

    image: ImageKnobs
    video: VideoKnobs


def parse_processor_kwargs(given: Mapping[str, Any], *, video_counts_clip: bool, hears: bool = False) -> RequestKnobs:
    """Parse a request's kwargs. Raises BadRequestError for an impossible value, or for an unknown key, with the known
    ones.

    `video_counts_clip`: True if `size` means a whole clip's area to the family's video processor (Qwen3-VL). Such a
    processor has neither min_pixels nor max_pixels. `hears`: whether the model takes sounds.
    """
    flat = {**dict.fromkeys(_VIDEOS), **_known(given, (*_VIDEOS, *_NESTED), "")}
    images, videos = ({name: flat[name] for name in names} for names in _NESTED.values())
    for (nested, names), values in zip(_NESTED.items(), (images, videos), strict=True):
        inner = flat.get(nested)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise _refuse(nested, f"is {shown(inner)}; it must be an object")
        for name, value in _known(inner, names, f"{nested}.").items():
            if value is not None and values[name] is not None:
                raise _refuse(f"{nested}.{name}", f"is given in {_FIELD}.{name}, too")
            values[name] = value if value is not None else values[name]
    if videos[_SOUND] and not hears:
        raise _refuse(_SOUND, "is true; the model takes no sounds")
    try:
        return RequestKnobs(image=_image_knobs(images), video=_video_knobs(videos, counts_clip=video_counts_clip))
    except BadRequestError as error:
        if error.param is None:
            error = BadRequestError(f"{_FIELD}: {error.message}", param=_FIELD, code=error.code)
        raise error from None


def _image_knobs(values: Mapping[str, Any]) -> ImageKnobs:
    shortest, longest = _size(values["size"])
    low, high = values["min_pixels"], values["max_pixels"]
    knobs = ImageKnobs(
        min_pixels=shortest if low is None else low,
        max_pixels=longest if high is None else high,
        skip_repeats=values["skip_repeats"],
    )
    check_image_knobs(knobs)
    return knobs


def _video_knobs(values: Mapping[str, Any], *, counts_clip: bool) -> VideoKnobs:
    for name in _FLAGS:
        if values[name] is not None and not isinstance(values[name], bool):
            raise _refuse(name, f"is {shown(values[name])}; it must be true or false")
    shortest, longest = _size(values["size"])
    area = ImageKnobs(min_pixels=values["min_pixels"], max_pixels=values["max_pixels"])
    check_image_knobs(area)
    unused: tuple[str, ...] = ()
    if counts_clip:
        unused = tuple(f"{_FIELD}.{name}" for name in ("min_pixels", "max_pixels") if values[name] is not None)
    else:
        shortest = shortest if area.min_pixels is None else area.min_pixels
        longest = longest if area.max_pixels is None else area.max_pixels
    defaults = VideoDefaults(
        shortest_edge=shortest,
        longest_edge=longest,
        cap_pixels_per_frame=values["cap_pixels_per_frame"],
        unused=unused,
    )
    check_consistent(defaults)
    word = None if values["num_frames"] is None else "num_frames"
    own = {name: values[name] for name in (*_SAMPLING, *_PRUNING, "sampling")}
    knobs = VideoKnobs(**own, count_word=word, use_audio_in_video=values[_SOUND] or None, defaults=defaults)
    check_knobs(knobs)
    return knobs


def _size(value: Any) -> tuple[Any, Any]:
    """Return the checked shortest and longest edge of `size`, which are areas in pixels."""
    if value is None:
        return None, None
    if not isinstance(value, Mapping):
        raise _refuse("size", f"is {shown(value)}; it must be an object with {' and '.join(_SIZE)}")
    edges = {**dict.fromkeys(_SIZE), **_known(value, _SIZE, "size.")}
    for name, edge in edges.items():
        check_count(f"size.{name}", edge)
    return edges["shortest_edge"], edges["longest_edge"]


def _known(given: Mapping[str, Any], names: tuple[str, ...], prefix: str) -> dict[str, Any]:
    for key in given:
        if key not in names:
            what = f"{prefix}{key}" if isinstance(key, str) and len(key) <= 80 else shown(key)
            raise _refuse(what, f"is not a known key; known are {', '.join(prefix + name for name in names)}")
    return dict(given)


def _refuse(key: str, why: str) -> BadRequestError:
    return BadRequestError(f"{_FIELD}.{key} {why}", param=f"{_FIELD}.{key}", code="invalid_value")
