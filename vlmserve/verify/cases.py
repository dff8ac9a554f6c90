"""What is asked: text, pictures and clips that are drawn here, and what the user brings."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image, ImageDraw

Kind = Literal["text", "image", "video"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_STORY = (
    "In the morning the street was empty. A woman put a blue cup on the table next to the window, opened a book at its "
    "first page and began to read; two hours later the cup was still full, the dog had eaten half of the bread, and it "
    "had started to rain. Retell this in your own words, and say what you think happened to the other half."
)
_DESCRIBE = "Describe the picture in detail."


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A conversation in OpenAI's form. Its media are {"type": "image", "image": Path}, or the same with "video"."""

    name: str
    messages: tuple[dict[str, Any], ...]


def made_cases(kinds: Collection[str], folder: Path) -> list[Case]:
    """The cases of these kinds, in a fixed order; their media are drawn into `folder`."""
    cases = []
    if "text" in kinds:
        brief = {"role": "system", "content": "Answer in one short sentence."}
        turns = (_user("Name three colours."), {"role": "assistant", "content": "Red, green and blue."})
        cases += [
            Case(name="text", messages=(_user(_STORY),)),
            Case(name="text, several turns", messages=(brief, *turns, _user("Which of them is the sky's?"))),
        ]
    if "image" in kinds:
        wide, tall = _draw_picture(folder / "wide.png", 450, 310, 0), _draw_picture(folder / "tall.png", 233, 401, 3)
        turns = (_user(_image(wide), "What is this?"), {"role": "assistant", "content": "Coloured shapes."})
        cases += [
            Case(name="image", messages=(_user(_image(wide), _DESCRIBE),)),
            Case(name="images, several turns", messages=(*turns, _user("And this?", _image(tall)))),
        ]
    if "video" in kinds:
        clip = _draw_clip(folder / "clip.mp4")
        still = _draw_picture(folder / "still.png", 320, 240, 5)
        cases += [
            Case(name="video", messages=(_user(_video(clip), "What happens in the video?"),)),
            Case(name="image and video", messages=(_user("Compare:", _image(still), _video(clip), "What differs?"),)),
        ]
    return cases


def own_case(pictures: Sequence[Path], videos: Sequence[Path], prompt: str | None) -> Case:
    """One question about the user's own files, in this order."""
    text = prompt or ("Describe what you see in detail." if pictures or videos else "Hello!")
    return Case(name="own", messages=(_user(*map(_image, pictures), *map(_video, videos), text),))


def media_paths(case: Case, kind: Literal["image", "video"]) -> list[Path]:
    """The files of one kind, in prompt order."""
    contents = [message["content"] for message in case.messages]
    return [part[kind] for parts in contents if isinstance(parts, list) for part in parts if part["type"] == kind]


def _user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def _image(path: Path) -> dict[str, Any]:
    return {"type": "image", "image": path}


def _video(path: Path) -> dict[str, Any]:
    return {"type": "video", "video": path}


def _draw_picture(path: Path, width: int, height: int, turn: int) -> Path:
    """Four shapes on a ground that changes from corner to corner, so that no two patches are equal."""
    picture = Image.linear_gradient("L").resize((width, height))
    ground = Image.merge("RGB", (picture, picture.transpose(Image.Transpose.ROTATE_180), Image.new("L", picture.size)))
    pen = ImageDraw.Draw(ground)
    colours = ("red", "yellow", "white", "blue", "green", "black", "purple")
    size = min(width, height) // 5
    for place in range(4):
        x, y = (0.27 + 0.46 * (place % 2)) * width, (0.27 + 0.46 * (place // 2)) * height
        colour = colours[(turn + place) % len(colours)]
        pen.regular_polygon((x, y, size), n_sides=3 + (turn + place) % 4, rotation=13 * place, fill=colour)
    ground.save(path)
    return path


def _draw_clip(path: Path, *, seconds: int = 4, rate: int = 8, width: int = 320, height: int = 240) -> Path:
    """A disc that goes round and changes its colour on the way."""
    import av

    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=Fraction(rate))  # FFmpeg's own encoder: every build has it
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(seconds * rate):
            part = number / (seconds * rate)
            frame = Image.new("RGB", (width, height), (30, 60, 90))
            angle = 2 * math.pi * part
            x, y = (0.5 + 0.3 * math.cos(angle)) * width, (0.5 + 0.3 * math.sin(angle)) * height
            colour = (round(255 * part), round(255 * (1 - part)), 40)
            ImageDraw.Draw(frame).ellipse((x - 40, y - 40, x + 40, y + 40), fill=colour)
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode(None))
    return path
