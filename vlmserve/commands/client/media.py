"""Pictures and videos as the user names them: a path, a file: URI, or a web address."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from processors.formats import HEAD_BYTES, modality_of
from processors.inputs import Modality
from vlmserve.commands.client.chat_files import data_url
from vlmserve.commands.client.conversation import media_part
from vlmserve_common.errors import VlmserveError

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm")
KINDS = {Modality.IMAGE: "picture", Modality.VIDEO: "video"}
"""The names of modalities in messages to users."""

_PICTURE_ENDINGS = (*PICTURES, ".jfif", ".heic", ".jxl")
_VIDEO_ENDINGS = (*VIDEOS, ".avi", ".mpg", ".mpeg", ".wmv", ".flv")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


class MediumError(VlmserveError):
    """A file is neither a picture nor a video, or cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """A picture or video to send. name: as the user gave it.

    url: a web address, which the server fetches, or the file's content as a data: URL.
    """

    name: str
    modality: Modality
    url: str

    @property
    def kind(self) -> str:
        """The modality's name for users."""
        return KINDS[self.modality]

    def part(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the medium as a part of a message."""
        return media_part(self.modality, self.url, options)


def scheme_of(address: str) -> str:
    """Return a URL's scheme in small letters; "" for a path."""
    match = _SCHEME.match(address)
    return match.group(1).lower() if match else ""


def is_web_address(word: str) -> bool:
    """Return True if the server is to fetch it."""
    return word.lower().startswith(("http://", "https://"))


def local_path(word: str) -> Path:
    """Return the path of a file: URI, or a path with its `~` expanded."""
    if scheme_of(word) == "file":
        return Path(unquote(urlsplit(word).path, errors="surrogateescape"))
    return Path(os.path.expanduser(word))


def begins_as_medium(path: Path) -> bool:
    """Return True if a file's first bytes are those of a picture or video; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return modality_of(file.read(HEAD_BYTES)) is not None
    except OSError:
        return False


def ending_modality(name: str) -> Modality | None:
    """Return the modality that a name's ending promises, if any."""
    ending = os.path.splitext(name)[1].lower()
    if ending in _PICTURE_ENDINGS:
        return Modality.IMAGE
    return Modality.VIDEO if ending in _VIDEO_ENDINGS else None


def open_medium(word: str, modality: Modality | None = None) -> Medium:
    """Read a file, or note a web address.

    modality: to send it as. The default comes from a file's first bytes, or from an address's ending. Raises
    MediumError, with the reason.
    """
    if is_web_address(word):
        promised = modality or ending_modality(urlsplit(word).path) or Modality.IMAGE
        return Medium(name=word, modality=promised, url=word)
    data = _read(word)
    medium = medium_of_bytes(word, data)
    if modality in (None, medium.modality):
        return medium
    if modality is Modality.VIDEO and data.startswith(b"GIF8"):  # a GIF is both
        return replace(medium, modality=modality)
    raise MediumError(f"{word!r} is a {medium.kind}, not a {KINDS[modality]}")


def medium_of_bytes(name: str, data: bytes) -> Medium:
    """Make a medium of a file's content. Raises MediumError."""
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
