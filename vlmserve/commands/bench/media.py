"""The pictures, clips and questions that benchmarks ask about, and the workloads that servers are compared by.

The same seed draws the same bytes. No cache knows a workload's questions from before.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

import numpy as np
from PIL import Image

from vlmserve.commands.client.media import data_url


def picture_part(picture: bytes) -> dict[str, object]:
    """Return a picture file as a part of a message in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about pictures (files), or about none."""

    pictures: tuple[bytes, ...]
    text: str

    def messages(self, part: Callable[[bytes], dict[str, object]] = picture_part) -> list[dict[str, object]]:
        """Return the conversation. part: makes what stands for a picture in it."""
        return [{"role": "user", "content": [*map(part, self.pictures), {"type": "text", "text": self.text}]}]


def make_questions(count: int, *, pictures: int = 1, side: int, seed: int) -> list[Question]:
    """Return questions about pictures of side x side pixels that differ in every pixel, so that no cache helps."""
    made = []
    for number in range(count):
        shown = tuple(draw_picture(side, [seed, number * pictures + place]) for place in range(pictures))
        text = f"What is shown? Answer in a few words. ({seed}-{number})"  # texts differ, too
        made.append(Question(pictures=shown, text=text))
    return made


def draw_picture(side: int, seed: list[int]) -> bytes:
    """Return a PNG file of side x side pixels, soft colours drawn from the seed."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def scene(width: int, height: int, seed: int) -> np.ndarray:
    """Return uint8 [height, width, 3]: soft colours with grain, so that files are about as large as photographs."""
    rng = np.random.default_rng(seed)
    soft = Image.fromarray(rng.integers(0, 256, (9, 16, 3), dtype=np.uint8)).resize((width, height), 3)
    return (np.asarray(soft, np.int16) + rng.integers(-9, 10, (height, width, 3))).clip(0, 255).astype(np.uint8)


def jpeg(width: int, height: int, seed: int) -> bytes:
    """Return a JPEG file of a scene."""
    file = io.BytesIO()
    Image.fromarray(scene(width, height, seed)).save(file, "JPEG", quality=90)
    return file.getvalue()


def clip(width: int, height: int, *, seconds: int, rate: int) -> bytes:
    """Return an MP4 file in H.264 with x264's default settings: a camera that circles over a scene.

    A tenth of the clip is encoded, and repeated ten times.
    """
    import av

    margin = 64
    big = scene(width + 2 * margin, height + 2 * margin, 0)
    count, file = max(1, seconds * rate // 10), io.BytesIO()
    with av.open(file, "w", format="mp4") as box:
        stream = box.add_stream("libx264", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        packets = []
        for number in range(count):
            angle = 2 * math.pi * number / count
            x, y = (round(margin * (1 + part)) for part in (math.cos(angle), math.sin(angle)))
            pixels = np.ascontiguousarray(big[y : y + height, x : x + width])
            packets += stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
        packets += stream.encode(None)
        step = round(count / rate / packets[0].time_base)
        for turn in range(10):
            for packet in packets:
                again = av.Packet(bytes(packet))  # muxing consumes the packet
                again.stream, again.time_base, again.duration = stream, packet.time_base, packet.duration
                assert packet.pts is not None
                assert packet.dts is not None
                again.pts, again.dts = packet.pts + turn * step, packet.dts + turn * step
                again.is_keyframe = packet.is_keyframe
                box.mux(again)
    return file.getvalue()


CountTokens = Callable[[str], int]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A number of requests, `at_a_time` of them under way.

    pictures: the questions show these in turn, one each; 0 for text alone. tokens_in: of the question's text.
    tokens_out: of each answer.
    """

    requests: int
    at_a_time: int
    pictures: int
    tokens_in: int
    tokens_out: int

    def scaled(self, scale: float) -> Workload:
        """Return the workload with `scale` times the requests and pictures, at least one."""
        requests, pictures = (max(1, round(many * scale)) if many else 0 for many in (self.requests, self.pictures))
        return replace(self, requests=requests, pictures=pictures)

    def __str__(self) -> str:
        seen = {0: "no picture", self.requests: "a new picture each"}.get(self.pictures, f"{self.pictures} pictures")
        return (
            f"{self.requests} requests, {self.at_a_time} at a time, {seen}, "
            f"{self.tokens_in} text tokens in, {self.tokens_out} out"
        )


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "latency": Workload(requests=8, at_a_time=1, pictures=8, tokens_in=64, tokens_out=64),
        "throughput": Workload(requests=32, at_a_time=16, pictures=32, tokens_in=64, tokens_out=64),
        "repeat": Workload(requests=16, at_a_time=4, pictures=4, tokens_in=64, tokens_out=32),
        "text": Workload(requests=16, at_a_time=8, pictures=0, tokens_in=32, tokens_out=128),
    }
)


def make_workload(work: Workload, *, side: int, salt: str, count: CountTokens | None) -> list[Question]:
    """Return the questions of a workload. Another salt gives other pixels and other words.

    side: of the square pictures, in pixels. count: counts the tokens of a text; None makes texts of about that length.
    """
    dice = random.Random(salt)
    seed = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:4])
    pictures = [jpeg(side, side, seed + number) for number in range(work.pictures)]
    return [
        Question(
            pictures=(pictures[number % len(pictures)],) if pictures else (), text=_text(dice, work.tokens_in, count)
        )
        for number in range(work.requests)
    ]


def _text(dice: random.Random, tokens: int, count: CountTokens | None) -> str:
    """Return words of no language with that many tokens."""
    if count is None:
        return " ".join(_word(dice) for _ in range(max(1, tokens // 2)))  # a word takes about two
    text = ""
    while True:
        longer = f"{text} {_word(dice)}".strip()
        length = count(longer)
        if length == tokens:
            return longer
        if length < tokens:
            text = longer


def _word(dice: random.Random) -> str:
    return "".join(dice.choices(_LETTERS, k=dice.choice((2, 3, 4))))
