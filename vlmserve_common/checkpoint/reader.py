"""Reads checkpoint folders: JSON files, and tensors streamed from safetensors straight into their destination.

The safetensors format is read here rather than mapped: mapped pages count as memory of the process for as long as a
file is open, so the weights would be there twice. A file is 8 bytes (length n of the header, little-endian), n bytes of
JSON (name -> dtype, shape, data_offsets behind the header), and the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.stream import Copies, Part, Progress, StoredTensor, Stream, copies_to
from vlmserve_common.compute.shard import Box, Cut
from vlmserve_common.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_MAX_HEADER_BYTES = 100 * 1024**2
_THREADS, _PART_BYTES = 4, 4 * 1024**2


def parts_of(
    stored: StoredTensor, cut: Cut | Box | None, target: torch.Tensor
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Yield the stored pieces of a part, each with the view of `target` [the part's shape] that it fills."""
    if cut is None:
        yield stored, target
    elif isinstance(cut, Cut):
        yield stored.cut(cut), target
    else:
        filled = 0
        for start, size in cut.stretches[0]:
            own = stored.cut(Cut(0, start, size, stored.shape[0]))
            yield from _boxed(own, cut.stretches[1:], target[filled : filled + size])
            filled += size


def _boxed(
    stored: StoredTensor, stretches: tuple[tuple[tuple[int, int], ...], ...], target: torch.Tensor
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Yield the pieces of some stretches in every dimension but the first, of which all entries are wanted."""
    *outer, last = stretches
    whole = [((0, size),) for size in stored.shape[1:]]
    if [*outer, last] == whole:
        yield stored, target
    elif outer == whole[:-1]:  # columns alone
        filled = 0
        for start, size in last:
            yield stored.cut(Cut(-1, start, size, stored.shape[-1])), target[..., filled : filled + size]
            filled += size
    else:
        for index in range(stored.shape[0]):
            yield from parts_of(stored.at(index), Box(stretches, stored.shape[1:]), target[index])


class CheckpointReader:
    """The tensors of a folder with `model.safetensors`, or with shards and their index.

    Making one reads the headers of all files and checks them; CheckpointError names the file and the key at fault.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        for file, expected in _files(folder):
            stored = read_header(file)
            if expected is not None:
                _check_against_index(file, stored, expected)
            self.tensors.update(stored)

    def read_into(self, targets: Iterable[tuple[StoredTensor, torch.Tensor]]) -> None:
        """Copy tensors into `targets` (of the stored shape, any dtype and device), casting where they differ.

        The bytes of some `stream.Part`s are held besides the targets. CheckpointError if a file is unreadable.
        """
        by_device: dict[torch.device, list[Part]] = {}
        for stored, target in targets:
            flat = target.detach().flatten(0, -2) if stored.row else target.detach().view(-1)
            part = Part(stored=stored, start=stored.start, target=flat)
            by_device.setdefault(target.device, []).append(part)
        progress = Progress(sum(part.size for parts in by_device.values() for part in parts))
        for device, parts in by_device.items():
            read_parts(parts, copies_to(device), progress.add)
        progress.end()


class GivenTensors(CheckpointReader):
    """Tensors that lie in files of any kind. folder: their name in errors."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder, self.tensors = folder, tensors


def read_parts(parts: Iterable[Part], copies: Copies, done: Callable[[int], object], *, largest: int = 0) -> None:
    """Fill the targets of parts, in the order of their bytes. largest: bytes that are read at once, if `cut` needs more
    than usual. done, errors: those of `Stream.run`."""
    stream = Stream(copies, threads=_THREADS, part_bytes=max(_PART_BYTES, largest))
    stream.run(sorted(parts, key=lambda part: (part.stored.file, part.start)), done)


def _files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """Safetensors files, each with the names its index says it has (None without an index). A single file is preferred
    to an index that does not name it."""
    if (folder / SINGLE_FILE).is_file() and not _is_one_of_several(folder):
        return [(folder / SINGLE_FILE, None)]
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE}: weight_map is missing or empty")
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX_FILE}: {name!r} is in {file!r}, which is no plain file name")
        names.setdefault(file, set()).add(name)
    for file, expected in names.items():
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder}: {file} is missing; the index puts {_some(expected)} there")
    return [(folder / file, expected) for file, expected in sorted(names.items())]


def _is_one_of_several(folder: Path) -> bool:
    """Whether the index names the file that has all tensors elsewhere: an MTP head may have a file of its own."""
    try:
        return SINGLE_FILE in read_json(folder, INDEX_FILE, required=False).get("weight_map", {}).values()
    except (CheckpointError, AttributeError):
        return False


def _check_against_index(file: Path, stored: dict[str, StoredTensor], expected: set[str]) -> None:
    absent, unlisted = expected - stored.keys(), stored.keys() - expected
    if absent:
        raise CheckpointError(f"{file}: {_some(absent)} should be in it by {INDEX_FILE}, and is not")
    if unlisted:
        raise CheckpointError(f"{file}: {_some(unlisted)} is in it, and not in {INDEX_FILE}")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. CheckpointError names the file and the key at fault."""
    try:
        with file.open("rb", buffering=0) as source:
            size = file.stat().st_size
            length = int.from_bytes(source.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{file}: no safetensors file, or a truncated one ({size} bytes)")
            header = json.loads(source.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _stored(file, name, entry, 8 + length, size) for name, entry in entries.items()}
    except OSError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: broken safetensors header: {error!r}") from error


def _stored(file: Path, name: str, entry: dict[str, Any], data_start: int, file_size: int) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    start, end = entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{file}: {name} is stored as {entry['dtype']}; supported are {', '.join(_DTYPES)}")
    if min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file}: {name} has shape {list(shape)} but {end - start} bytes of {entry['dtype']}")
    if data_start + end > file_size:
        raise CheckpointError(
            f"{file}: truncated: {name} ends at byte {data_start + end}, the file has {file_size} bytes"
        )
    return StoredTensor(name=name, file=file, dtype=dtype, shape=shape, start=data_start + start)


def _some(names: Iterable[str], limit: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
