"""The sample pictures and clips, with questions that the default model answers correctly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from processors.formats import HEAD_BYTES, modality_of
from processors.image.decoding import DecodeLimits, decode_image
from processors.inputs import Modality
from processors.video.decoding import Clip
from processors.video.options import VideoLimits
from vlmserve.commands.demo.conversation import Question

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
