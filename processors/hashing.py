"""Content hashes: BLAKE3 over length-framed fields, so that no two different contents can be arranged to collide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import blake3
import numpy as np

from processors.inputs import Modality
from processors.resize import PatchConfig


def digest_fields(fields: Iterable[bytes | memoryview], threads: int = 1) -> bytes:
    """Return 32 bytes that identify the sequence of fields. Each field is hashed behind its length, so borders count.

    `threads`: worth it for fields of megabytes.
    """
    hasher = blake3.blake3(max_threads=threads)
    for field in fields:
        view = memoryview(field).cast("B")
        hasher.update(view.nbytes.to_bytes(8, "little"))
        hasher.update(view)
    return hasher.digest()


def patch_digest(grid: tuple[int, int], frames: np.ndarray, config: PatchConfig) -> bytes:
    """Return the identity of one temporal patch of a picture or video: grid, cutting and every value of its frames.

    `grid`: (height, width) in patches. `frames`: uint8 [T, C, H, W] after resizing. Equal frames are hashed once, so a
    single frame equals as many copies as fill the patch. Frames and cutting settings together determine the patches
    that the tower gets.
    """
    return _frames_digest([b"vlmserve patch 2"], grid, frames, config)


def original_digest(grid: tuple[int, int], frames: np.ndarray, config: PatchConfig) -> bytes:
    """Return the identity of a temporal patch whose frames uint8 [T, H, W, C] are not resized yet.

    `patch_digest` hashes resized pixels, which are unknown here, so the two digests differ.
    """
    return _frames_digest([b"vlmserve original 1", config.resample.encode()], grid, frames, config)


def _frames_digest(kind: list[bytes], grid: tuple[int, int], frames: np.ndarray, config: PatchConfig) -> bytes:
    header = [*kind, np.asarray((*grid, *frames.shape[1:]), "<i8").tobytes(), config.identity.encode()]
    if all(np.array_equal(frames[0], frame) for frame in frames[1:]):
        frames = frames[:1]
    return digest_fields([*header, *map(_contents, frames)])


def media_digest(modality: Modality, grid_thw: tuple[int, int, int], patch_digests: Sequence[bytes]) -> bytes:
    """Return the identity of one preprocessed picture or video: modality, grid and its temporal patches."""
    header = [b"vlmserve media 3", modality.value.encode(), np.asarray(grid_thw, "<i8").tobytes()]
    return digest_fields([*header, *patch_digests])


def kept_digest(patch: bytes, kept: bytes) -> bytes:
    """Return the identity of a temporal patch of which some places are not encoded. `patch`: of the whole. `kept`: as
    in `TemporalPatch`."""
    return digest_fields([b"vlmserve kept 1", patch, kept])


def fewer_digest(media: bytes, kept: Sequence[bytes], counts: Sequence[int]) -> bytes:
    """Return the identity of a picture or clip of which tokens are left out. `media`: of all that is encoded. `kept`,
    `counts`: as in `MultimodalDataItem`; `media` if both are empty."""
    if not kept and not counts:
        return media
    return digest_fields([b"vlmserve fewer 1", media, np.asarray(counts, "<i8").tobytes(), *kept])


def sound_digest(features: np.ndarray, tokens: int) -> bytes:
    """Return the identity of a part of a sound: its log-mel features float32 [frames, mels], and how many tokens it
    is."""
    header = [b"vlmserve sound 1", np.asarray((tokens, *features.shape), "<i8").tobytes()]
    return digest_fields([*header, _contents(features)])


def embeds_digest(grid_thw: tuple[int, int, int], rows: np.ndarray) -> bytes:
    """Return the identity of a picture that came as embeddings. No picture that came as pixels has the same one."""
    header = [b"vlmserve embeds 1", np.asarray((*grid_thw, *rows.shape), "<i8").tobytes(), rows.dtype.str.encode()]
    return digest_fields([*header, _contents(rows)])


def _contents(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
