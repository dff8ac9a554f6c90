"""What a benchmark asks: distinct pictures with a short question each."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlmserve.commands.client.chat_files import data_url


def picture_part(picture: bytes) -> dict[str, object]:
    """A PNG file as a part of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


@dataclass(frozen=True, kw_only=True)
class Question:
    """About pictures (PNG files), or about none."""

    pictures: tuple[bytes, ...]
    text: str

    def messages(self, part: Callable[[bytes], dict[str, object]] = picture_part) -> list[dict[str, object]]:
        """The conversation. part: what stands for a picture in it."""
        return [{"role": "user", "content": [*map(part, self.pictures), {"type": "text", "text": self.text}]}]


def make_questions(count: int, *, pictures: int = 1, side: int, seed: int) -> list[Question]:
    """Questions about pictures of side x side pixels that differ in every pixel, so that no cache helps."""
    made = []
    for number in range(count):
        shown = tuple(draw_picture(side, [seed, number * pictures + place]) for place in range(pictures))
        text = f"What is shown? Answer in a few words. ({seed}-{number})"  # texts differ, too
        made.append(Question(pictures=shown, text=text))
    return made


def draw_picture(side: int, seed: list[int]) -> bytes:
    """A PNG file of side x side pixels, soft colours drawn from the seed."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()
