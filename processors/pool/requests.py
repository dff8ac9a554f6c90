"""Requests to the processor pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from PIL import Image

from processors.fetch.fetching import MediaFile
from processors.fetch.sources import Frame
from processors.inputs import Modality
from processors.knobs import ImageKnobs
from processors.video.options import VideoKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """The common part. `param`: the request field that the medium came from, for error messages.

    `tenant`: the tenant in whose name it is cached; "" is shared by all requests without a tenant.
    """

    param: str | None = None
    tenant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest(_Request):
    """One picture to load. `source`: a URL, a file, its bytes, or a Pillow picture."""

    source: str | bytes | MediaFile | Image.Image
    knobs: ImageKnobs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRequest(_Request):
    """One video to load. `source`: a URL, a file or its bytes, or its frames, each a URL, bytes or a Pillow picture."""

    source: str | bytes | MediaFile | tuple[Frame, ...]
    knobs: VideoKnobs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioRequest(_Request):
    """One sound to load. `source`: a URL, a file or its bytes; of a clip it is the sound track."""

    source: str | bytes | MediaFile


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsRequest(_Request):
    """One medium that comes as embeddings. `source`: a URL, a safetensors file or its bytes, or tensors by name."""

    source: str | bytes | MediaFile | Mapping[str, Any]
    modality: Modality = Modality.IMAGE


MediaRequest: TypeAlias = ImageRequest | VideoRequest | AudioRequest | EmbedsRequest
