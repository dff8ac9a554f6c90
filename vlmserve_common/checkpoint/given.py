"""Reads a `WeightSource`: a checkpoint, or tensors that lie in files, as shared memory does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch

from vlmserve_common.checkpoint.reader import CheckpointReader, GivenTensors, read_header
from vlmserve_common.checkpoint.stream import StoredTensor
from vlmserve_common.checkpoint.weight_source import TensorPlace, WeightSource
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import CheckpointError

_COPIED = 4 * 1024**2


def reader_of(source: WeightSource) -> CheckpointReader:
    """Return what reads a source. CheckpointError for files that are missing or too short, and for unknown dtypes."""
    if source.folder is not None:
        return CheckpointReader(Path(source.folder))
    if source.file is not None:
        try:
            return GivenTensors(Path(source.called), read_header(Path(source.file)))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(source.file, source.called)) from error
    sizes = {file: _size(file) for file in {place.file for place in source.tensors} if file}
    stored: dict[str, StoredTensor] = {}
    for place in source.tensors:
        if place.name in stored:
            raise CheckpointError(f"{source.called}: {place.name} is there twice")
        dtype = dtype_of(place)
        end = place.start + math.prod(place.shape) * dtype.itemsize
        if place.file and not 0 <= place.start <= end <= sizes[place.file]:
            raise CheckpointError(
                f"{source.called}: {place.name} is to be bytes {place.start} to {end} of {sizes[place.file]}"
            )
        stored[place.name] = StoredTensor(
            name=place.name, file=Path(place.file), dtype=dtype, shape=place.shape, start=place.start
        )
    return GivenTensors(Path(source.called), stored)


def dtype_of(place: TensorPlace) -> torch.dtype:
    """Return the dtype of a described tensor. CheckpointError for an unknown one, and for a shape that is none."""
    dtype = getattr(torch, place.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{place.name}: there is no dtype {place.dtype!r}")
    if min(place.shape, default=0) < 0:
        raise CheckpointError(f"{place.name}: {list(place.shape)} is no shape")
    return dtype


def copied(tensors: Iterable[StoredTensor], file: IO[bytes]) -> tuple[TensorPlace, ...]:
    """Copy tensors into a file, and return their places there. OSError."""
    places = []
    for stored in tensors:
        start, left = file.tell(), math.prod(stored.shape) * stored.dtype.itemsize
        with stored.file.open("rb") as source:
            source.seek(stored.start)
            while left:
                data = source.read(min(left, _COPIED))
                if not data:
                    raise OSError(f"{stored.file}: truncated while {stored.name} was copied")
                file.write(data)
                left -= len(data)
        dtype = dtype_name(stored.dtype)
        places.append(TensorPlace(name=stored.name, dtype=dtype, shape=stored.shape, file=file.name, start=start))
    file.flush()
    return tuple(places)


def _size(file: str) -> int:
    try:
        return Path(file).stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from None
