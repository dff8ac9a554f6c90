"""Picture or video? A file's first bytes tell."""

from __future__ import annotations

from processors.inputs import Modality
from processors.picture_formats import looks_like_other_picture, looks_like_picture
from processors.video_formats import video_format

HEAD_BYTES = 128
"""That many of a file's first bytes are enough."""


def modality_of(head: bytes) -> Modality | None:
    """What a file that begins with `head` is; a GIF is a picture. None for anything that is not read here."""
    if looks_like_picture(head):
        return Modality.IMAGE
    if looks_like_other_picture(head):
        return None
    return None if video_format(head) is None else Modality.VIDEO
