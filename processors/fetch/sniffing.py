"""Picture or video? A file's first bytes tell."""

from __future__ import annotations

from processors.formats import file_format
from processors.inputs import Modality

HEAD_BYTES = 128
"""That many of a file's first bytes are enough."""


def modality_of(head: bytes) -> Modality | None:
    """What a file that begins with `head` is; a GIF is a picture. None for anything that is not read here."""
    found = file_format(head)
    if found is None or not (found.plugin or found.kind == "video"):
        return None
    return Modality.IMAGE if found.plugin else Modality.VIDEO


def mime_type(head: bytes) -> str:
    """The MIME type of a file that begins with `head`; application/octet-stream for what is not read here."""
    found = file_format(head)
    if found is not None and found.plugin:
        return f"image/{found.name.lower()}"
    if found is not None and found.kind == "video":
        if found.ffmpeg == "mov":
            return "video/quicktime" if head[8:12] == b"qt  " else "video/mp4"
        return "video/webm" if b"webm" in head else "video/x-matroska"
    return "application/octet-stream"
