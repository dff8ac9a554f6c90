"""What can be asked of the processor pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from PIL import Image

from processors.fetch.fetching import is_remote
from processors.fetch.frame_lists import Frame
from processors.fetch.media_file import MediaFile
from processors.knobs import ImageKnobs
from processors.video.options import VideoKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """One picture to load. source: a URL, a file, its bytes, or a Pillow picture.

    param: the request field it came from, for error messages.
    """

    source: str | bytes | MediaFile | Image.Image
    knobs: ImageKnobs | None = None
    param: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRequest:
    """One video to load. source: a URL, a file or its bytes, or its frames, each a URL, bytes or a Pillow picture."""

    source: str | bytes | MediaFile | tuple[Frame, ...]
    knobs: VideoKnobs | None = None
    param: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsRequest:
    """One picture that comes encoded. source: a URL, a safetensors file or its bytes, or tensors by name."""

    source: str | bytes | MediaFile | Mapping[str, Any]
    param: str | None = None


MediaRequest: TypeAlias = ImageRequest | VideoRequest | EmbedsRequest


def waits_for_others(request: MediaRequest) -> bool:
    """Whether what it names lies with others, such as hosts and disks, that may keep a thread waiting."""
    source = request.source
    return any(map(_lies_elsewhere, source if isinstance(source, tuple) else (source,)))


def _lies_elsewhere(source: object) -> bool:
    return isinstance(source, MediaFile) or (isinstance(source, str) and is_remote(source))
