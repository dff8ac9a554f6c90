"""The conversations that both sides answer: text, sample pictures, a clip, and the user's own files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["text", "image", "video"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_STORY = (
    "In the morning the street was empty. A woman put a blue cup on the table next to the window, opened a book at its "
    "first page and began to read; two hours later the cup was still full, the dog had eaten half of the bread, and it "
    "had started to rain. Retell this in your own words, and say what you think happened to the other half."
)
_SAMPLES = Path(__file__).resolve().parents[1] / "demo" / "samples"
_DESCRIBE = "Describe the picture in detail."


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A conversation in OpenAI's form. Its media are {"type": "image", "image": Path}, or the same with "video"."""

    name: str
    messages: tuple[dict[str, Any], ...]


def made_cases(kinds: Collection[str]) -> list[Case]:
    """Return the cases of these kinds, in a fixed order."""
    wide, tall, still, clip = (
        _SAMPLES / name for name in ("shapes.png", "receipt.png", "two-stars.jpg", "rolling.mp4")
    )
    cases = []
    if "text" in kinds:
        brief = {"role": "system", "content": "Answer in one short sentence."}
        turns = (_user("Name three colours."), {"role": "assistant", "content": "Red, green and blue."})
        cases += [
            Case(name="text", messages=(_user(_STORY),)),
            Case(name="text, several turns", messages=(brief, *turns, _user("Which of them is the sky's?"))),
        ]
    if "image" in kinds:
        turns = (_user(_image(wide), "What is this?"), {"role": "assistant", "content": "Coloured shapes."})
        cases += [
            Case(name="image", messages=(_user(_image(wide), _DESCRIBE),)),
            Case(name="images, several turns", messages=(*turns, _user("And this?", _image(tall)))),
        ]
    if "video" in kinds:
        cases += [
            Case(name="video", messages=(_user(_video(clip), "What happens in the video?"),)),
            Case(name="image and video", messages=(_user("Compare:", _image(still), _video(clip), "What differs?"),)),
        ]
    return cases


def own_case(pictures: Sequence[Path], videos: Sequence[Path], prompt: str | None) -> Case:
    """Return a question about the user's own files, in their order."""
    text = prompt or ("Describe what you see in detail." if pictures or videos else "Hello!")
    return Case(name="own", messages=(_user(*map(_image, pictures), *map(_video, videos), text),))


def media_paths(case: Case, kind: Literal["image", "video"]) -> list[Path]:
    """Return the files of one kind, in prompt order."""
    contents = [message["content"] for message in case.messages]
    return [part[kind] for parts in contents if isinstance(parts, list) for part in parts if part["type"] == kind]


def _user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def _medium(kind: Kind, path: Path) -> dict[str, Any]:
    return {"type": kind, kind: path}


_image, _video = partial(_medium, "image"), partial(_medium, "video")
