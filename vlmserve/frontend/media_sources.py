"""What may stand in a part as a picture or a video: checked, and numpy arrays made pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from processors.fetch.fetching import MediaFile
from vlmserve_common.errors import BadRequestError

_FILES = (str, bytes, Path, MediaFile)
_PICTURE = "a URL, or without a server bytes, a Path, a Pillow picture or a numpy array uint8 [height, width, 3]"
_VIDEO = (
    "a URL or a list of frames, or without a server bytes, a Path or a numpy array uint8 [frames, height, width, 3]; "
    f"a frame is {_PICTURE}"
)


def picture_source(value: Any, param: str) -> Any:
    """`value` as a pool takes it. param: its place in the request. Raises BadRequestError naming both."""
    if isinstance(value, np.ndarray):
        _check(value, 3, _PICTURE, param)
        return Image.fromarray(value)
    if isinstance(value, (*_FILES, Image.Image)):
        return value
    raise _refused(_kind(value), _PICTURE, param)


def video_source(value: Any, param: str) -> Any:
    """The same of a video; a list of frames becomes a tuple."""
    if isinstance(value, np.ndarray):
        _check(value, 4, _VIDEO, param)
        return tuple(map(Image.fromarray, value))
    if isinstance(value, list | tuple):
        return tuple(picture_source(frame, f"{param}[{place}]") for place, frame in enumerate(value))
    if isinstance(value, _FILES):
        return value
    raise _refused(_kind(value), _VIDEO, param)


def _check(array: np.ndarray, dimensions: int, allowed: str, param: str) -> None:
    if array.dtype != np.uint8 or array.ndim != dimensions or array.shape[-1] != 3 or 0 in array.shape[-3:]:
        raise _refused(f"a numpy array {array.dtype} {list(array.shape)}", allowed, param)


def _refused(what: str | None, allowed: str, param: str) -> BadRequestError:
    is_what = "is missing" if what is None else f"is {what}"
    return BadRequestError(f"{param} {is_what}; it must be {allowed}", param=param, code="invalid_value")


def _kind(value: Any) -> str | None:
    return None if value is None else f"of type {type(value).__name__}"
