"""Pictures of the page: samples, the media of a prompt as the model saw them, and drawings of boxes and points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from processors.formats import HEAD_BYTES, modality_of
from processors.image.decoding import DecodeLimits, decode_image
from processors.inputs import Modality
from processors.video.decoding import Clip
from processors.video.options import VideoLimits
from vlmserve.commands.client.boxes import Marks, parse_boxes
from vlmserve.commands.client.conversation import ChatQuestion
from vlmserve_common.errors import BadRequestError

Question = ChatQuestion[Path]
FOLDER = (Path(__file__).parent / "samples").resolve()
"""The folder of samples in the package."""

_SIDE = 160  # of a thumbnail, in pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class Thumbnail:
    """A sample to click on. images: a small one for each of its media."""

    question: str
    images: tuple[Image.Image, ...]
    is_clip: bool


def load_samples(folder: Path = FOLDER) -> tuple[Question, ...]:
    """Return the questions that the page offers. Raises OSError if files are missing."""
    samples = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    return tuple(
        Question(text=sample["question"], media=tuple(folder / name for name in sample["media"]))
        for sample in samples
        if sample.get("offered", False)
    )


def make_thumbnails(samples: Sequence[Question]) -> tuple[Thumbnail, ...]:
    """Make the thumbnails. A clip shows its first frame. Raises OSError and BadRequestError for unreadable files."""
    return tuple(map(_thumbnail, samples))


def _thumbnail(sample: Question) -> Thumbnail:
    contents = [path.read_bytes() for path in sample.media]
    clips = [modality_of(data[:HEAD_BYTES]) is Modality.VIDEO for data in contents]
    images = [
        Image.fromarray(next(Clip(data, VideoLimits()).read([0]))) if clip else decode_image(data, DecodeLimits())
        for data, clip in zip(contents, clips, strict=True)
    ]
    for image in images:
        image.thumbnail((_SIDE, _SIDE))
    return Thumbnail(question=sample.text, images=tuple(images), is_clip=any(clips))


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
        pruning = self.report.get("pruning") or {}
        tokens = self.report["tokens"] + pruning.get("repeats", 0) + pruning.get("unchanged", 0)
        return max(1, round(math.sqrt(math.prod(self.report["grid_thw"]) / max(1, tokens))))


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


_LONGEST_SIDE_DRAWN = 1600  # of the drawing, in pixels
_COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#f032e6")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A picture with marks. rows: number, label, and x1, y1, x2, y2 in pixels of the sent picture.

    A point has equal corners. problems: a sentence for each mark that could not be read.
    """

    image: Image.Image
    rows: tuple[tuple[int, str, int, int, int, int], ...]
    problems: tuple[str, ...]


def draw_marks(text: str, media: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> Drawing | None:
    """Draw the answer's marks on the last picture of the conversation; None without marks or picture.

    media: the server's report. files: the same media, in the same order. Raises OSError for a file that is gone.
    """
    pictures = [pair for pair in zip(files, media, strict=False) if pair[1]["kind"] == "image"]
    marks = parse_boxes(text)
    if not pictures or not (marks.boxes or marks.points):
        return None
    path, medium = pictures[-1]
    try:
        picture = decode_image(path.read_bytes(), DecodeLimits())
        marks = marks.to_source(medium)
    except (BadRequestError, ValueError):  # too large for this process, or in unknown coordinates
        return None
    rows = tuple(_rows(marks))
    return Drawing(image=_draw(picture, rows), rows=rows, problems=marks.problems)


def _rows(marks: Marks) -> list[tuple[int, str, int, int, int, int]]:
    boxes = [(box.label, box.x1, box.y1, box.x2, box.y2) for box in marks.boxes]
    points = [(point.label, point.x, point.y, point.x, point.y) for point in marks.points]
    return [
        (number, label or "", round(x1), round(y1), round(x2), round(y2))
        for number, (label, x1, y1, x2, y2) in enumerate(boxes + points, 1)
    ]


def _draw(picture: Image.Image, rows: Sequence[tuple[int, str, int, int, int, int]]) -> Image.Image:
    """Draw marks with numbers. The one font at hand lacks most letters of labels."""
    scale = min(1.0, _LONGEST_SIDE_DRAWN / max(picture.size))
    if scale < 1:
        picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))
    image = picture.copy()
    draw = ImageDraw.Draw(image)
    side = max(image.size)
    width, font = max(2, side // 300), ImageFont.load_default(max(12, side // 40))
    for number, _, x1, y1, x2, y2 in rows:
        colour = _COLOURS[(number - 1) % len(_COLOURS)]
        left, right = (_within(x * scale, image.width) for x in sorted((x1, x2)))
        top, bottom = (_within(y * scale, image.height) for y in sorted((y1, y2)))
        if (x1, y1) == (x2, y2):
            radius = 3 * width
            draw.ellipse((left - radius, top - radius, left + radius, top + radius), outline=colour, width=width)
        else:
            draw.rectangle((left, top, right, bottom), outline=colour, width=width)
        draw.text(
            (left + 2 * width, top + width), str(number), fill=colour, font=font, stroke_width=1, stroke_fill="white"
        )
    return image


def _within(place: float, size: int) -> int:
    return min(max(round(place), 0), size - 1)
