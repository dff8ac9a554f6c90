"""Tars of samples, as WebDataset has them: files that differ only after the first dot belong together."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from processors.inputs import Modality
from vlmserve.commands.batch.inputs.files import BROKEN, Columns, ItemFile, MediaReader, jsonable, printable, reason
from vlmserve.commands.batch.item import Failed, Found, MediumItem
from vlmserve.commands.client.media import PICTURES, VIDEOS
from vlmserve_common.errors import BadRequestError

_MOST_HEADER_BYTES = 2**20


def members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files in a tar, while `file` stands at the beginning of their bytes.

    Nothing is unpacked, no list is kept, and `file` is only read forward. Raises EOFError for a tar that is cut off,
    OSError for a damaged one.
    """
    headers = _Headers(file)
    try:
        archive = tarfile.TarFile(fileobj=cast("BinaryIO", headers))
        at = -1
        while (member := archive.next()) is not None:
            if archive.offset <= at:  # a size may be negative
                raise OSError("a header leads backwards")
            at = archive.offset
            archive.members.clear()  # type: ignore[attr-defined]  # it keeps a list of all
            if member.isreg() and not member.issparse():
                yield member
    except Exception as error:  # tarfile may raise anything for a made-up header
        kind = EOFError if headers.ended or isinstance(error, EOFError) else OSError
        raise kind(reason(error)) from None
    # tarfile takes a damaged or missing header for the end.
    if headers.ended:
        raise EOFError("its end mark is missing")
    if any(headers.last):
        raise OSError("a header is damaged")


class _Headers:
    """The file as tarfile sees it. tarfile reads headers only, so a huge one is refused unread.

    last: the bytes of the last read. ended: the last read got less than it asked for.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.last = b""
        self.ended = False

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_HEADER_BYTES:
            raise OSError(f"a header of {size} bytes")
        self.last = self._file.read(size)
        self.ended = len(self.last) < size
        return self.last

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()


_MOST_TEXT_BYTES = 2**20
_MOST_FILES = 1000


@dataclass(kw_only=True, slots=True)
class _TarSample:
    """Files of one key. media: endings, and what makes the items once all fields are known.

    problem: why the sample cannot be used; its other files are then skipped.
    """

    key: str
    files: int = 0
    held_bytes: int = 0
    media: list[tuple[str, Callable[..., MediumItem]]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        self.media.clear()
        self.fields.clear()


@dataclass(frozen=True, kw_only=True)
class Tar:
    """A `Source` of samples. A sample's picture or video is an item, with the id shard.tar/key.

    Its other small files are the item's fields: the fields of a JSON object, or a text under its ending. Several media
    of one sample are several items, with ids shard.tar/key.ending.
    """

    file: ItemFile
    media: MediaReader
    columns: Columns

    def __iter__(self) -> Iterator[Found]:
        samples = 0
        try:
            signature = self.file.signature()
            with self.file.open() as file:
                for sample in self._samples(file, signature):
                    samples += 1
                    yield from self._found(sample)
                if self.file.is_compressed:
                    file.read(_MOST_TEXT_BYTES)  # the checksum comes at the end
        except BROKEN as error:
            yield self.file.broken(error, done=samples, what="sample")

    def count(self) -> Iterator[int | None]:
        if self.file.path is None or self.file.is_compressed:
            yield None
            return
        try:
            with self.file.open() as file:
                for member in members(file):
                    key, ending = _split(member.name)
                    if key and _modality(ending) is not None:
                        yield 1
        except BROKEN:
            return

    def _samples(self, file: BinaryIO, signature: str) -> Iterator[_TarSample]:
        sample: _TarSample | None = None
        for member in members(file):
            key, ending = _split(member.name)
            if not key:
                continue
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = _TarSample(key=key)
            sample.files += 1
            if sample.files > _MOST_FILES:
                sample.fail(f"it has more than {_MOST_FILES} files")
            if sample.problem is None:
                self._take(sample, file, member.name, ending, member.size, signature)
        if sample is not None:
            yield sample

    def _take(self, sample: _TarSample, file: BinaryIO, name: str, ending: str, size: int, signature: str) -> None:
        modality = _modality(ending)
        if modality is None:
            if size <= _MOST_TEXT_BYTES:
                _add_field(sample.fields, ending, _exactly(file, size))
            return
        limit = self.media.fetcher.settings.limit(modality)
        if size > limit.bytes:
            sample.fail(f"{printable(name)} has {size} bytes, the limit is {limit.bytes} (setting {limit.setting})")
            return
        offset = file.tell()
        if self.file.path is not None and not self.file.is_compressed:
            read = functools.partial(_part_of, self.file.path, offset, size)
        else:
            sample.held_bytes += size
            most = self.media.fetcher.settings.limit(Modality.VIDEO)
            if sample.held_bytes > most.bytes:
                sample.fail(f"its files have more than {most.bytes} bytes (setting {most.setting})")
                return
            read = functools.partial(bytes, _exactly(file, size))
        make = functools.partial(self.media.held, read, signature=f"{signature} {offset}", size=size, name=name)
        sample.media.append((ending, make))

    def _found(self, sample: _TarSample) -> Iterator[Found]:
        name = f"{self.file.name}/{printable(sample.key)}"
        if sample.problem is not None:
            yield Failed(id=name, message=sample.problem, code="sample_too_large")
        fields = {"key": printable(sample.key), **sample.fields}
        prompt = fields.get(self.columns.prompt or "")
        id = fields.get(self.columns.id or "")
        for ending, make in sample.media:
            own = (name if id in (None, "") else str(id)) + (f".{ending}" if len(sample.media) > 1 else "")
            yield make(id=own, fields=fields, prompt=prompt if isinstance(prompt, str) else None)


def _split(name: str) -> tuple[str, str]:
    """Return key and ending; an empty key for a file that belongs to no sample."""
    folder, base = os.path.split(name.removeprefix("./"))
    stem, dot, ending = base.partition(".")
    return (os.path.join(folder, stem), ending.lower()) if stem and dot else ("", "")


def _modality(ending: str) -> Modality | None:
    suffix = f".{ending.rpartition('.')[2]}"
    if suffix in PICTURES:
        return Modality.IMAGE
    return Modality.VIDEO if suffix in VIDEOS else None


def _add_field(fields: dict[str, Any], ending: str, data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    if "\0" in text:
        return
    value: Any = text.strip()
    if ending == "json" or ending.endswith(".json"):
        with contextlib.suppress(ValueError, RecursionError):
            value = jsonable(json.loads(text))
        if ending == "json" and isinstance(value, dict):
            fields.update(value)
            return
    elif ending == "cls" and value.isdecimal():
        value = int(value)
    fields[ending] = value


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("unexpected end of data")
    return data


def _part_of(path: Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise BadRequestError(f"cannot read {str(path)!r}: {error.strerror}", code="invalid_media_url") from None
    if len(data) < size:
        raise BadRequestError(f"{str(path)!r} is shorter than before", code="invalid_media_url")
    return data
