"""The media of a prompt as the model saw them: at their final sizes, and a clip as its used frames."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from processors.image.decoding import DecodeLimits, decode_image
from processors.video.decoding import Clip
from processors.video.options import VideoLimits
from vlmserve_common.errors import BadRequestError

_MOST_MEDIA = 6
_MOST_STEPS = 8  # of a clip, in time
_LONGEST_SIDE, _LONGEST_SIDE_OF_FRAMES = 1024, 320  # as they are shown, in pixels
_CLIP_LIMITS = VideoLimits(max_decode_s=20.0, decode_threads=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One picture, possibly smaller than the model saw it. seconds: its time in a clip."""

    image: Image.Image
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenMedium:
    """A medium as the model saw it. A clip has several steps in time, each of one or more frames. A picture has one.

    number: its place in the prompt, from 1. report: the server's. problem: the reason if it cannot be shown.
    """

    number: int
    report: Mapping[str, Any]
    steps: tuple[tuple[Frame, ...], ...] = ()
    problem: str | None = None

    @property
    def patches(self) -> tuple[int, int]:
        """The number of patches in width and height."""
        return self.report["grid_thw"][2], self.report["grid_thw"][1]

    @property
    def patches_of_a_token(self) -> int:
        """The number of patches on each side of a token's square."""
        return max(1, round(math.sqrt(math.prod(self.report["grid_thw"]) / max(1, self.report["tokens"]))))


def see(media: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> tuple[SeenMedium, ...]:
    """Return the last few media of a prompt, in order.

    media: the server's report. files: the same media, in the same order.
    """
    pairs = list(enumerate(zip(files, media, strict=False), 1))[-_MOST_MEDIA:]
    return tuple(_see(number, path, report) for number, (path, report) in pairs)


def _see(number: int, path: Path, report: Mapping[str, Any]) -> SeenMedium:
    try:
        data = path.read_bytes()
        steps = tuple(_steps(data, report) if report.get("video") else _picture(data, report))
    except (BadRequestError, OSError) as error:  # other limits than the server's, or the file is gone since
        return SeenMedium(number=number, report=report, problem=str(error))
    return SeenMedium(number=number, report=report, steps=steps)


def _picture(data: bytes, report: Mapping[str, Any]) -> Iterator[tuple[Frame, ...]]:
    yield (Frame(image=_resized(decode_image(data, DecodeLimits()), report, _LONGEST_SIDE)),)


def _steps(data: bytes, report: Mapping[str, Any]) -> Iterator[tuple[Frame, ...]]:
    """Yield evenly chosen steps of a clip, with the first and the last."""
    video = report["video"]
    indices, times = video["frame_indices"], video["timestamps"]
    depth = math.ceil(len(indices) / max(1, report["grid_thw"][0]))
    starts = _some(range(0, len(indices), depth), _MOST_STEPS)
    steps = [range(start, min(start + depth, len(indices))) for start in starts]
    arrays = Clip(data, _CLIP_LIMITS).read([indices[place] for step in steps for place in step])
    images = (_resized(Image.fromarray(array), report, _LONGEST_SIDE_OF_FRAMES) for array in arrays)
    for step in steps:
        yield tuple(Frame(image=next(images), seconds=times[place]) for place in step)


def _some(of: Sequence[int], most: int) -> list[int]:
    if len(of) <= most:
        return list(of)
    return [of[round(k * (len(of) - 1) / (most - 1))] for k in range(most)]


def _resized(picture: Image.Image, report: Mapping[str, Any], longest: int) -> Image.Image:
    """Resize to the model's size, and then to the largest size to show."""
    size = report["final_size"]["width"], report["final_size"]["height"]
    resized = picture.resize(size, Image.Resampling.BICUBIC)
    resized.thumbnail((longest, longest))
    return resized
