"""Content hashes: BLAKE3 over length-framed fields, so that no two different contents can be arranged to collide."""

from __future__ import annotations

from collections.abc import Iterable

import blake3
import numpy as np

from processors.inputs import Modality


def digest_fields(fields: Iterable[bytes | memoryview]) -> bytes:
    """32 bytes that stand for the sequence of fields: each goes in behind its length, so borders count."""
    hasher = blake3.blake3()
    for field in fields:
        view = memoryview(field).cast("B")
        hasher.update(view.nbytes.to_bytes(8, "little"))
        hasher.update(view)
    return hasher.digest()


def media_digest(modality: Modality, grid_thw: tuple[int, int, int], pixels: np.ndarray) -> bytes:
    """The identity of one preprocessed picture or video: modality, grid, type, shape and every value of `pixels`.

    pixels: after resizing. Under one checkpoint's settings they determine the patches, in an eighth of their bytes.
    """
    header = [
        b"vlmserve media 2",
        modality.value.encode(),
        np.asarray(grid_thw, "<i8").tobytes(),
        pixels.dtype.str.encode(),
        np.asarray(pixels.shape, "<i8").tobytes(),
    ]
    return digest_fields([*header, _contents(pixels)])


def embeds_digest(grid_thw: tuple[int, int, int], rows: np.ndarray) -> bytes:
    """The identity of one picture that came encoded, never that of one that did not."""
    header = [b"vlmserve embeds 1", np.asarray((*grid_thw, *rows.shape), "<i8").tobytes(), rows.dtype.str.encode()]
    return digest_fields([*header, _contents(rows)])


def _contents(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
