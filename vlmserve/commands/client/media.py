"""Pictures and videos as the user names them: a path, a file: URI, or a web address."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from processors.formats import HEAD_BYTES, modality_of
from processors.inputs import Modality
from vlmserve.commands.client.conversation import media_part
from vlmserve.commands.client.data_urls import data_url
from vlmserve.commands.client.media_names import PICTURES, VIDEOS
from vlmserve_common.errors import VlmserveError

KINDS = {Modality.IMAGE: "picture", Modality.VIDEO: "video"}
"""What people call them."""

_PICTURE_ENDINGS = (*PICTURES, ".jfif", ".heic", ".jxl")
_VIDEO_ENDINGS = (*VIDEOS, ".avi", ".mpg", ".mpeg", ".wmv", ".flv")


class MediumError(VlmserveError):
    """What was named is no picture and no video, or cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """name: as the user gave it. url: a web address, which the server fetches, or the file's content as data: URL."""

    name: str
    modality: Modality
    url: str

    @property
    def kind(self) -> str:
        """Its modality, for people."""
        return KINDS[self.modality]

    def part(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """It as a part of a message."""
        return media_part(self.modality, self.url, options)


def ending_modality(name: str) -> Modality | None:
    """What a name's ending promises; None where it promises neither a picture nor a video."""
    ending = os.path.splitext(name)[1].lower()
    if ending in _PICTURE_ENDINGS:
        return Modality.IMAGE
    return Modality.VIDEO if ending in _VIDEO_ENDINGS else None


def is_web_address(word: str) -> bool:
    """Whether the server is to fetch it."""
    return word.lower().startswith(("http://", "https://"))


def local_path(word: str) -> Path:
    """A path with its `~`, or that of a file: URI."""
    if word.lower().startswith("file:"):
        return Path(unquote(urlsplit(word).path))
    return Path(os.path.expanduser(word))


def open_medium(word: str, modality: Modality | None = None) -> Medium:
    """Read a file, or note down a web address.

    modality: what it is to be sent as; by default a file's first bytes tell, and an address's ending. Raises
    MediumError, with the reason.
    """
    if is_web_address(word):
        promised = modality or ending_modality(urlsplit(word).path) or Modality.IMAGE
        return Medium(name=word, modality=promised, url=word)
    data = _read(word)
    medium = medium_of_bytes(word, data)
    if modality in (None, medium.modality):
        return medium
    if modality is Modality.VIDEO and data.startswith(b"GIF8"):  # it is both
        return replace(medium, modality=modality)
    raise MediumError(f"{word!r} is a {medium.kind}, not a {KINDS[modality]}")


def medium_of_bytes(name: str, data: bytes) -> Medium:
    """A file's content. Raises MediumError."""
    modality = modality_of(data[:HEAD_BYTES])
    if modality is None:
        raise MediumError(f"{name!r} is neither a picture nor a video of a format that is read here")
    return Medium(name=name, modality=modality, url=data_url(data))


def _read(word: str) -> bytes:
    path = local_path(word)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise MediumError(f"{word!r} is a folder; name the files in it")
        if not stat.S_ISREG(mode):  # reading it might never end
            raise MediumError(f"{word!r} is no ordinary file")
        return path.read_bytes()
    except FileNotFoundError:
        raise MediumError(f"there is no file {word!r}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise MediumError(f"{word!r} cannot be read: {reason or error}") from None
