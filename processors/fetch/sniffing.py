"""Picture or video? A file's first bytes tell."""

from __future__ import annotations

from processors.image.formats import format_name, looks_like_other_picture, looks_like_picture
from processors.inputs import Modality
from processors.video.formats import video_format

HEAD_BYTES = 128
"""That many of a file's first bytes are enough."""


def modality_of(head: bytes) -> Modality | None:
    """What a file that begins with `head` is; a GIF is a picture. None for anything that is not read here."""
    if looks_like_picture(head):
        return Modality.IMAGE
    if looks_like_other_picture(head):
        return None
    return None if video_format(head) is None else Modality.VIDEO


def mime_type(head: bytes) -> str:
    """The MIME type of a file that begins with `head`; application/octet-stream for what is not read here."""
    picture = format_name(head)
    if picture is not None:
        return f"image/{picture.lower()}"
    if looks_like_other_picture(head):
        return "application/octet-stream"
    match video_format(head):
        case "mov":
            return "video/quicktime" if head[8:12] == b"qt  " else "video/mp4"
        case "matroska":
            return "video/webm" if b"webm" in head else "video/x-matroska"
    return "application/octet-stream"
