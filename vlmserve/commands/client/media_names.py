"""What paths and URLs of media stand for, for commands that are given them by the user."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from processors.formats import HEAD_BYTES, modality_of

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


def scheme_of(address: str) -> str:
    """Of a URL, in small letters; "" for a path."""
    match = _SCHEME.match(address)
    return match.group(1).lower() if match else ""


def local_path(address: str, folder: Path) -> Path | None:
    """The file that a path (below `folder`, if it is relative) or file: URL names; None for other URLs."""
    scheme = scheme_of(address)
    if not scheme:
        return folder / Path(address).expanduser()
    return Path(unquote(urlsplit(address).path, errors="surrogateescape")) if scheme == "file" else None


def begins_as_medium(path: Path) -> bool:
    """Whether a file is a picture or video by its first bytes; False for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return modality_of(file.read(HEAD_BYTES)) is not None
    except OSError:
        return False
