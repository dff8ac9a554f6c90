"""The file of one entry of the embedding store: embeddings as safetensors, with one possible form for each content.

The file has 512 bytes of header, then the matrix. The header follows from the key, the dtype, the shape and every byte
of the matrix (by a BLAKE3 checksum). A reader builds the header again from the file's data and compares. If one byte
differs, the file is torn, altered or belongs to another key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import FileIO

import numpy as np
from blake3 import blake3

KEY_BYTES = 32
HEADER_BYTES = 512
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # safetensors' names


class DamagedEntryError(Exception):
    """A file is not the entry that its name says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsFormat:
    """The form of a matrix. `dtype`: a key of `ITEM_BYTES`. `rows`, `width`: 1 or more."""

    dtype: str
    rows: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * ITEM_BYTES[self.dtype]


def entry_header(key: bytes, form: EmbedsFormat, data: memoryview) -> bytes:
    """Return the 512 bytes before `data` in the file of a key (32 bytes). `data`: the matrix, little-endian, row by
    row."""
    checksum = blake3(f"{key.hex()} {form.dtype} {form.rows} {form.width}\n".encode())
    checksum.update(data)
    header = {
        "__metadata__": {"key": key.hex(), "blake3": checksum.hexdigest()},
        "rows": {"dtype": form.dtype, "shape": [form.rows, form.width], "data_offsets": [0, form.nbytes]},
    }
    length = HEADER_BYTES - 8
    return length.to_bytes(8, "little") + json.dumps(header).encode().ljust(length)


def read_format(file: FileIO) -> EmbedsFormat:
    """Read the format from a file's header. Only the file's length is checked against it.

    Raises DamagedEntryError, and OSError when the file cannot be read.
    """
    return _parsed(file, _read(file, HEADER_BYTES).tobytes())


def read_entry(file: FileIO, key: bytes) -> tuple[EmbedsFormat, np.ndarray]:
    """Read and check the file of a key, from its start; return its format and matrix, uint8 [nbytes].

    Raises DamagedEntryError for any other content than the one written for that key. Raises OSError for a file that
    cannot be read.
    """
    header = _read(file, HEADER_BYTES).tobytes()
    form = _parsed(file, header)
    data = _read(file, form.nbytes)
    if entry_header(key, form, data.data) != header:
        raise DamagedEntryError("its content is not what was written under this key")
    return form, data


def _parsed(file: FileIO, header: bytes) -> EmbedsFormat:
    try:
        entry = json.loads(header[8:])["rows"]
        rows, width = entry["shape"]
        form = EmbedsFormat(dtype=entry["dtype"], rows=rows, width=width)
        sound = form.dtype in ITEM_BYTES and all(type(size) is int and size > 0 for size in (rows, width))
    except (ValueError, LookupError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise DamagedEntryError("its header cannot be read")
    size = file.seek(0, 2)
    file.seek(HEADER_BYTES)
    if size != HEADER_BYTES + form.nbytes:
        raise DamagedEntryError(f"it has {size} bytes, not {HEADER_BYTES + form.nbytes}")
    return form


def _read(file: FileIO, count: int) -> np.ndarray:
    # numpy asks for large pages, torch does not: four times as fast where the memory is fresh
    data = np.empty(count, dtype=np.uint8)
    rest = data.data
    while rest:
        got = file.readinto(rest)
        if not got:
            raise DamagedEntryError("it is cut off")
        rest = rest[got:]
    return data
