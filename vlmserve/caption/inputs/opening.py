"""From the words of a command line to what they stand for."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from processors.fetch.blocking import BlockingFetcher
from vlmserve.caption.inputs.braces import check_ranges, expanded, has_range
from vlmserve.caption.inputs.files import ItemFile, Once
from vlmserve.caption.inputs.folders import Folder, Pattern, matches
from vlmserve.caption.inputs.jsonl import JsonLines
from vlmserve.caption.inputs.lines import AddressList
from vlmserve.caption.inputs.media import MediaReader
from vlmserve.caption.inputs.packages import need
from vlmserve.caption.inputs.remote_folders import RemoteFiles
from vlmserve.caption.inputs.single import Each, OneMedium
from vlmserve.caption.inputs.source import HTTP, Columns, Source, path_in
from vlmserve.caption.inputs.tables import Table
from vlmserve.caption.inputs.tars import Tar
from vlmserve.caption.item import Found, Unreadable
from vlmserve.client.media_names import local_path, scheme_of
from vlmserve.config.checks import SettingsError

InputFormat: TypeAlias = Literal["media", "list", "jsonl", "parquet", "tar"]
_FORMATS: dict[str, InputFormat] = {
    ".txt": "list",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".tar": "tar",
    ".tgz": "tar",
}


class Inputs:
    """All that a command line names, in its order. It may be gone through again, but for a list on standard input."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def __iter__(self) -> Iterator[Found]:
        """Nothing is read before it is asked for, and nothing is kept."""
        for source in self._sources:
            yield from source

    def count(self) -> Iterator[int | None]:
        """How many items have been counted so far; None, and no more, where only reading everything would tell."""
        total = 0
        for source in self._sources:
            for number in source.count():
                if number is None:
                    yield None
                    return
                total += number
                yield total


def open_inputs(
    words: Sequence[str],
    *,
    fetcher: BlockingFetcher,
    stdin: BinaryIO,
    columns: Columns | None = None,
    input_format: InputFormat | None = None,
) -> Inputs:
    """What the words of a command line stand for.

    fetcher: may read any local file, for the user has named it. input_format: of all files and of standard input,
    whatever their names say. Raises SettingsError for a word that stands for nothing, and for a missing package.
    """
    words = list(dict.fromkeys(words))
    opener = _Opener(
        media=MediaReader(fetcher),
        columns=columns or Columns(),
        stdin=Once(stdin),
        format=input_format,
        named=frozenset(os.path.abspath(os.path.expanduser(word)) for word in words),
    )
    return Inputs([opener.source(word) for word in words])


@dataclass(frozen=True, kw_only=True)
class _Opener:
    media: MediaReader
    columns: Columns
    stdin: Once
    format: InputFormat | None
    named: frozenset[str]

    def source(self, word: str) -> Source:
        if word == "-":
            return self._file(ItemFile(address=word, stream=self.stdin), self.format or "list")
        scheme = scheme_of(word)
        if scheme and os.path.lexists(word):  # a file with a colon in its name
            return self._local(os.path.join(os.curdir, word))
        if scheme == "file":
            return self._local(str(local_path(word, Path())))
        if has_range(word):
            return self._range(word)
        return self._remote(word) if scheme else self._local(os.path.expanduser(word))

    def _range(self, word: str) -> Source:
        check_ranges(word)
        local = not scheme_of(word)
        if local and not any(os.path.lexists(name) for name in expanded(word)):
            raise SettingsError(f"INPUT {word!r}: there is none of these files")
        self._one_file(next(expanded(word)))
        return Each(names=lambda: expanded(word), open=self._one_file)

    def _local(self, path: str) -> Source:
        if os.path.isdir(path):
            return Folder(path=path, media=self.media, passed_over=self.named - {os.path.abspath(path)})
        try:
            os.stat(path)
        except OSError as error:
            if not glob.has_magic(path):
                raise SettingsError(f"INPUT {path!r}: {error.strerror}") from None
            return self._pattern(path)
        return self._one_file(path)

    def _pattern(self, pattern: str) -> Source:
        if next(matches(pattern), None) is None:
            raise SettingsError(f"INPUT {pattern!r}: nothing matches this pattern")
        if self._format(pattern) == "media":
            return Pattern(pattern=pattern, media=self.media)
        self._one_file(pattern)
        return Each(names=lambda: _files_matching(pattern), open=self._one_file)

    def _remote(self, word: str) -> Source:
        scheme = scheme_of(word)
        is_media = self._format(word) == "media"
        if is_media and (scheme == "data" or (scheme in HTTP and "::" not in word)):
            return OneMedium(address=word, media=self.media)
        from vlmserve.caption.inputs.remote import file_system, reason

        system, path = file_system(word)
        files = RemoteFiles(word=word, system=system, path=path, media=self.media)
        if scheme not in HTTP and glob.has_magic(path):
            return files if is_media else Each(names=files.addresses, open=self._one_file)
        try:
            system.info(path)
        except Exception as error:  # whatever a driver raises
            raise SettingsError(f"INPUT {word!r}: {reason(error)}") from None
        return files if is_media else self._one_file(word)

    def _one_file(self, address: str) -> Source:
        """Raises SettingsError for a missing package."""
        format = self._format(address)
        if format == "media":
            return OneMedium(address=address, media=self.media)
        if scheme_of(address):
            from vlmserve.caption.inputs.remote import file_system

            file_system(address)
        return self._file(ItemFile(address=address), format)

    def _file(self, file: ItemFile, format: InputFormat) -> Source:
        if format == "jsonl":
            return JsonLines(file=file, media=self.media, columns=self.columns)
        if format == "list":
            return AddressList(file=file, media=self.media)
        if format == "parquet":
            need(file.address, "pyarrow")
            return Table(file=file, media=self.media, columns=self.columns)
        return Tar(file=file, media=self.media, columns=self.columns)

    def _format(self, address: str) -> InputFormat:
        if self.format is not None:
            return self.format
        name = path_in(address).lower().removesuffix(".gz")
        return _FORMATS.get(os.path.splitext(name)[1], "media")


def _files_matching(pattern: str) -> Iterator[str | Unreadable]:
    for found in matches(pattern):
        if isinstance(found, Unreadable):
            yield found
        elif not found.is_folder:
            yield found.path
