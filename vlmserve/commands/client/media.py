"""Pictures, videos and sounds: as the user names them, and as the files of messages."""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import unquote, urlsplit

from processors.fetch.limits import FetchSettings
from processors.formats import HEAD_BYTES, first_bytes, mime_type, modality_of
from processors.inputs import Modality
from vlmserve.commands.client.conversation import media_part
from vlmserve.frontend.chat_messages import map_parts
from vlmserve_common.errors import BadRequestError, VlmserveError

Message: TypeAlias = Mapping[str, Any]
_MODALITIES = {
    "image_url": Modality.IMAGE,
    "image": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "video": Modality.VIDEO,
    "audio_url": Modality.AUDIO,
    "audio": Modality.AUDIO,
}


def told_modality(data: bytes) -> Modality:
    """Return the modality that a file's first bytes tell. Raises BadRequestError if it is no medium."""
    modality = modality_of(data[:HEAD_BYTES])
    if modality is None:
        what = f"neither a picture nor a video of a supported format; it begins with {first_bytes(data)}"
        raise BadRequestError(f"the file is {what if data else 'empty'}", code="unsupported_content")
    return modality


def modality_within_limit(data: bytes, settings: FetchSettings) -> Modality:
    """Return a file's modality. Raises BadRequestError if it is no medium, or larger than its modality's limit."""
    modality = told_modality(data)
    limit = settings.limit(modality)
    if len(data) > limit.bytes:
        what = f"the file has {len(data)} bytes, the limit is {limit.bytes} (setting {limit.setting})"
        raise BadRequestError(what, code="invalid_media_url")
    return modality


def with_addresses(messages: Sequence[Message], read: Callable[[str, Modality], Any]) -> list[Message]:
    """Return messages with `read(address, modality)` for each path or URL, except data: URLs and uploaded files.

    They stand in parts of Qwen's form: {"type": "image", "image": content}. A part without any change stays, also one
    of an unexpected shape. A BadRequestError of `read` gets the place in the request.
    """

    def with_file(part: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in tuple(_MODALITIES):  # which may be of any type
            return part
        value = part.get(kind)
        others = {name: given for name, given in part.items() if name not in ("type", kind)}
        if isinstance(value, Mapping):
            others |= {name: given for name, given in value.items() if name != "url"}
            value = value.get("url")
        several = value if isinstance(value, list | tuple) else [value]
        modality = _MODALITIES[kind]
        try:
            content = [read(one, modality) if _is_file(one) else one for one in several]
        except BadRequestError as error:
            error.param = error.param or place
            raise
        if all(one is before for one, before in zip(content, several, strict=True)):
            return part
        return {**others, "type": modality.value, modality.value: content if several is value else content[0]}

    return map_parts(messages, with_file)


def with_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Return messages as JSON for a server. messages: files are bytes or URLs, in parts of Qwen's form.

    They become image_url, video_url and audio_url parts, which all servers know. A part's other fields (knobs) stay
    beside them. A list of frames stays in Qwen's form, since OpenAI's API has none for it.
    """

    def url(content: Any) -> Any:
        return data_url(content) if isinstance(content, bytes) else content  # URLs and uploaded files stay

    def with_url(part: Mapping[str, Any], _place: str) -> Mapping[str, Any]:
        kind = part.get("type")
        value = part.get(kind) if kind in ("image", "video", "audio") else None
        if isinstance(value, list):
            return {**part, "video": [url(frame) for frame in value]}
        if not isinstance(value, bytes | str):
            return part
        others = {name: given for name, given in part.items() if name not in ("type", kind, "detail")}
        source = {"url": url(value)}
        if part.get("detail") is not None:
            source["detail"] = part["detail"]
        return {**others, "type": f"{kind}_url", f"{kind}_url": source}

    return map_parts(messages, with_url)


def data_url(content: bytes) -> str:
    """Return a picture's or video's file as a URL."""
    return f"data:{mime_type(content[:HEAD_BYTES])};base64,{base64.b64encode(content).decode()}"


def _is_file(address: Any) -> TypeGuard[str]:
    return isinstance(address, str) and not address.startswith("data:")


PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm")
SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac")
KINDS = {Modality.IMAGE: "picture", Modality.VIDEO: "video", Modality.AUDIO: "sound"}
"""The names of modalities in messages to users."""

_PICTURE_ENDINGS = (*PICTURES, ".jfif", ".heic", ".jxl")
_VIDEO_ENDINGS = (*VIDEOS, ".avi", ".mpg", ".mpeg", ".wmv", ".flv")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


class MediumError(VlmserveError):
    """A file is neither a picture nor a video, or cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """A picture, video or sound to send. name: as the user gave it.

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
    if ending in SOUNDS:
        return Modality.AUDIO
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
    is_both = data.startswith(b"GIF8") if modality is Modality.VIDEO else medium.modality is Modality.VIDEO
    if is_both and modality in (Modality.VIDEO, Modality.AUDIO):  # a GIF, and the sound track of a clip
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
