"""Outputs of vectors: tables, matrices, lines and a file for each item. Records have vectors as base64 of float16."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmserve.commands.caption.outputs.base import JsonLinesOutput, Sidecars
from vlmserve.commands.caption.outputs.parts import Parquet, Whole
from vlmserve_common.files import replacing

if TYPE_CHECKING:
    import pyarrow as pa

_IDS = ".ids.jsonl"


def as_text(vector: np.ndarray) -> str:
    """Return a vector as records have it."""
    return base64.b64encode(vector.astype("<f2").tobytes()).decode()


def vector_of(record: Mapping[str, Any]) -> np.ndarray:
    """Return a record's vector, float16 [dimensions]."""
    return np.frombuffer(base64.b64decode(record["embedding"]), dtype="<f2")


class VectorTable(Parquet):
    """An output of parquet files with a column of vectors, lists of float16 of one length."""

    def schema(self, first: Mapping[str, Any] | None) -> pa.Schema:
        """See `Parquet`."""
        import pyarrow as pa

        width = 0 if first is None else len(first["embedding"])
        kinds = {"embedding": pa.list_(pa.float16(), width), "prompt_tokens": pa.int64()}
        names = ("id", "embedding", "model", "prompt_tokens", "blake3", "fields")
        return pa.schema([(name, kinds.get(name, pa.string())) for name in names])

    def row(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """See `Parquet`."""
        fields = json.dumps(record["fields"], ensure_ascii=False) if "fields" in record else None
        return {**record, "embedding": vector_of(record), "fields": fields}


class VectorMatrix(Whole):
    """An output of NumPy's files, float16 [items, dimensions]. Beside each, NAME.ids.jsonl has the id of each row."""

    def paths(self, others: Any) -> list[Path]:
        """See `Output`."""
        return [path for part in super().paths(others) for path in (part, _ids(part))]

    def discard(self, journal: Any) -> None:
        """See `Output`."""
        for part in range(journal.state()["next_part"] + 1 if journal.state() else 0):
            _ids(self._names.path(part)).unlink(missing_ok=True)
        super().discard(journal)

    def write_part(self, path: Path, records: Iterator[dict[str, Any]], count: int) -> None:
        """See `Whole`. A matrix has its name only once its ids are on disk."""
        matrix: np.memmap | None = None
        with (
            replacing(path, on_disk=True) as unfinished,
            replacing(_ids(path), on_disk=True) as names,
            names.open("w", encoding="utf-8") as ids,
        ):
            for row, record in zip(range(count), records, strict=False):
                vector = vector_of(record)
                if matrix is None:
                    shape = (count, len(vector))
                    matrix = np.lib.format.open_memmap(unfinished, mode="w+", dtype="<f2", shape=shape)
                matrix[row] = vector
                ids.write(json.dumps(record["id"], ensure_ascii=False) + "\n")
            if matrix is None:
                unfinished.write_bytes(_npy(np.zeros((0, 0), dtype="<f2")))
            else:
                matrix.flush()


class VectorLines(JsonLinesOutput):
    """An output of lines of JSON, with vectors as lists of numbers."""

    def _line(self, record: Mapping[str, Any]) -> bytes:
        numbers = [float(f"{one:.5g}") for one in vector_of(record).tolist()]  # which float16 reads as they were
        return json.dumps({**record, "embedding": numbers}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class VectorFiles(Sidecars):
    """An output of a NumPy file for each item, float16 [dimensions]."""

    def _content(self, record: Mapping[str, Any]) -> bytes:
        return _npy(vector_of(record))


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _ids(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".npy") + _IDS)


OUTPUTS = {
    ".jsonl": VectorLines,
    ".ndjson": VectorLines,
    ".parquet": VectorTable,
    ".npy": VectorMatrix,
    "folder": VectorFiles,
}
"""The outputs by the endings of their names."""
