"""What a picture file is made of, looked at before a decoder opens it.

Pillow reads headers in Python, before anything is known of the picture's size, and in places in time or memory that
grows with the square of what it reads. A file of a few MiB can so keep a thread, and Python's lock, for minutes. So the
parts that a file is made of (segments, chunks, blocks, directories, boxes) are counted first, and files of far more
parts than ordinary ones are refused. A file that is merely broken passes: the decoder says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from processors.image.avif_structure import check_avif
from processors.image.bmp_structure import check_bmp
from processors.image.gif_structure import check_gif
from processors.image.jpeg_structure import check_jpeg
from processors.image.limits import DecodeLimits
from processors.image.png_structure import check_png
from processors.image.tiff_structure import check_tiff
from processors.image.webp_structure import check_webp

_CHECKS: Mapping[str, Callable[[bytes, DecodeLimits], None]] = MappingProxyType(
    {
        "AVIF": check_avif,
        "BMP": lambda data, _: check_bmp(data),
        "GIF": lambda data, _: check_gif(data),
        "JPEG": lambda data, _: check_jpeg(data),
        "PNG": lambda data, _: check_png(data),
        "TIFF": lambda data, _: check_tiff(data),
        "WebP": check_webp,
    }
)


def check_structure(format: str, data: bytes, limits: DecodeLimits) -> None:
    """Raises BadRequestError for a file of that format (a name of picture_formats) that is costly to open."""
    _CHECKS[format](data, limits)
