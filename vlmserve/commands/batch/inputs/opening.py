"""Opens the words of a command line: files, folders, patterns, ranges and URLs become sources of items."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from processors.fetch.fetching import BlockingFetcher
from vlmserve.commands.batch.inputs.files import (
    HTTP,
    NAME_FIELDS,
    Columns,
    ItemFile,
    MediaReader,
    Source,
    need,
    path_in,
    reason,
)
from vlmserve.commands.batch.inputs.records import AddressList, JsonLines, Table
from vlmserve.commands.batch.inputs.tars import Tar
from vlmserve.commands.batch.inputs.trees import Files, LocalTree, TreeEntry
from vlmserve.commands.batch.item import Failed, Found, MediumItem
from vlmserve.commands.client.media import local_path, scheme_of
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
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_NAMES = 1_000_000
_ANY = ""  # among the names of fields: there may be others


class Inputs:
    """All items of a command line, in its order. Iterating again is possible, except over standard input."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def __iter__(self) -> Iterator[Found]:
        """Yield the items. Nothing is read before it is asked for, and nothing is kept."""
        for source in self._sources:
            yield from source

    @property
    def ignored(self) -> int:
        """The number of files in folders left out so far, since they are neither pictures nor videos."""
        return sum(source.ignored for source in self._sources if isinstance(source, Files))

    def prompt_fields(self) -> frozenset[str] | None:
        """Return the names of the fields that items can have for their prompts; None if only reading them tells."""
        known = {name for source in self._sources for name in _prompt_fields(source)}
        return None if _ANY in known else frozenset(known)

    def count(self) -> Iterator[int | None]:
        """Yield how many items are counted so far; None, as the last, if only reading everything would tell."""
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
    request_fields: Collection[str] | None = None,
) -> Inputs:
    """Open the words of a command line.

    fetcher: may read any local file, since the user has named it. input_format: overrides the names of all files, and
    of standard input. request_fields: the fields of chat requests that are used; None uses all. Raises SettingsError
    for a word that matches nothing, and for a missing package.
    """
    words = list(dict.fromkeys(words))
    opener = _Opener(
        media=MediaReader(fetcher),
        columns=columns or Columns(),
        stdin=iter((stdin,)),
        format=input_format,
        request_fields=request_fields,
        named=frozenset(os.path.abspath(os.path.expanduser(word)) for word in words),
    )
    return Inputs([opener.source(word) for word in words])


@dataclass(frozen=True, kw_only=True)
class _OneMedium:
    """A `Source` of one item."""

    item: Callable[[], MediumItem]

    def __iter__(self) -> Iterator[Found]:
        yield self.item()

    def count(self) -> Iterator[int | None]:
        return iter((1,))


@dataclass(frozen=True, kw_only=True)
class _Each:
    """A `Source` of several files. names: also yields failures of the search. open: makes a source of one file."""

    names: Callable[[], Iterator[str | Failed]]
    open: Callable[[str], Source]

    def __iter__(self) -> Iterator[Found]:
        for name in self.names():
            yield from (name,) if isinstance(name, Failed) else self.open(name)

    def count(self) -> Iterator[int | None]:
        for name in self.names():
            if isinstance(name, str):
                yield from self.open(name).count()


def _prompt_fields(source: Source) -> Collection[str]:
    """Return the names of the fields of a source. Of several files, the first tells."""
    match source:
        case _OneMedium() | Files() | AddressList():
            return NAME_FIELDS
        case Table():
            names = source.names()
            return (_ANY,) if names is None else (*NAME_FIELDS, *names)
        case _Each():
            name = next(iter(source.names()), None)
            return _prompt_fields(source.open(name)) if isinstance(name, str) else (_ANY,)
    return (_ANY,)


@dataclass(frozen=True, kw_only=True)
class _Opener:
    media: MediaReader
    columns: Columns
    stdin: Iterator[BinaryIO]
    format: InputFormat | None
    request_fields: Collection[str] | None
    named: frozenset[str]

    def source(self, word: str) -> Source:
        if word == "-":
            return self._file(ItemFile(address=word, stream=self.stdin), self.format or "list")
        scheme = scheme_of(word)
        if scheme and os.path.lexists(word):  # a file with a colon in its name
            return self._local(os.path.join(os.curdir, word))
        if scheme == "file":
            return self._local(str(local_path(word)))
        if _RANGE.search(word):
            return self._range(word)
        return self._remote(word) if scheme else self._local(os.path.expanduser(word))

    def _range(self, word: str) -> Source:
        names = 1
        for first, last in _RANGE.findall(word):
            names *= abs(int(last) - int(first)) + 1
        if names > _MOST_NAMES:
            raise SettingsError(f"INPUT {word!r} stands for {names} names; the most are {_MOST_NAMES}")
        if not scheme_of(word) and not any(os.path.lexists(name) for name in _expanded(word)):
            raise SettingsError(f"INPUT {word!r}: there is none of these files")
        self._one_file(next(_expanded(word)))
        return _Each(names=lambda: _expanded(word), open=self._one_file)

    def _local(self, path: str) -> Source:
        if os.path.isdir(path):
            tree = LocalTree(self.media, self.named - {os.path.abspath(path)})
            return Files(tree=tree, word=path, is_pattern=False)
        try:
            os.stat(path)
        except OSError as error:
            if not glob.has_magic(path):
                raise SettingsError(f"INPUT {path!r}: {error.strerror}") from None
            return self._pattern(path)
        return self._one_file(path)

    def _pattern(self, pattern: str) -> Source:
        tree = LocalTree(self.media)
        files = Files(tree=tree, word=pattern, is_pattern=True)
        if next(tree.matches(pattern), None) is None:
            raise SettingsError(f"INPUT {pattern!r}: nothing matches this pattern")
        return self._media_or_each(files, lambda entry: entry.path)

    def _remote(self, word: str) -> Source:
        scheme = scheme_of(word)
        is_media = self._format(word) == "media"
        if is_media and (scheme == "data" or (scheme in HTTP and "::" not in word)):
            return self._one_file(word)
        from vlmserve.commands.batch.inputs.remote import RemoteTree, file_system

        system, path = file_system(word)
        tree = RemoteTree(word, system, path, self.media)
        is_pattern = scheme not in HTTP and glob.has_magic(path)
        files = Files(tree=tree, word=path, is_pattern=is_pattern)
        if is_pattern:
            return self._media_or_each(files, lambda entry: tree.address(entry.path))
        try:
            info = system.info(path)
        except Exception as error:  # a driver may raise anything
            raise SettingsError(f"INPUT {word!r}: {reason(error)}") from None
        if not is_media:
            return self._one_file(word)
        if info["type"] == "directory":
            return files
        entry = TreeEntry(path=info["name"], name=info["name"], is_folder=False, info=info)
        return _OneMedium(item=lambda: tree.item(entry, ""))

    def _media_or_each(self, files: Files, address: Callable[[TreeEntry], str]) -> Source:
        if self._format(files.word) == "media":
            return files
        self._one_file(files.word)  # raises if its package is missing
        return _Each(names=lambda: files.named(address), open=self._one_file)

    def _one_file(self, address: str) -> Source:
        """Make the source of one file. Raises SettingsError for a missing package."""
        format = self._format(address)
        if format == "media":
            return _OneMedium(item=lambda: self.media.item(address))
        if scheme_of(address):
            from vlmserve.commands.batch.inputs.remote import file_system

            file_system(address)
        return self._file(ItemFile(address=address), format)

    def _file(self, file: ItemFile, format: InputFormat) -> Source:
        if format == "jsonl":
            fields = self.request_fields
            return JsonLines(file=file, media=self.media, columns=self.columns, request_fields=fields)
        if format == "list":
            return AddressList(file=file, media=self.media)
        if format == "parquet":
            need(f"INPUT {file.address!r}", "pyarrow")
            return Table(file=file, media=self.media, columns=self.columns)
        return Tar(file=file, media=self.media, columns=self.columns)

    def _format(self, address: str) -> InputFormat:
        return self.format or _format_of(address)


def _format_of(address: str) -> InputFormat:
    name = path_in(address).lower().removesuffix(".gz")
    return _FORMATS.get(os.path.splitext(name)[1], "media")


def local_files(words: Sequence[str], expected: Sequence[Path]) -> Iterator[Path]:
    """Yield the local files that the words of a command line name, without those in folders.

    expected: files that may not be there yet; those that a pattern will find are yielded, too. Patterns of pictures and
    videos find only these, since there may be millions.
    """
    for word in words:
        path = Path(word) if os.path.lexists(word) else local_path(word)
        if word == "-":
            yield Path("/dev/stdin")
        elif os.path.exists(path):
            yield path
        elif scheme_of(word) in ("", "file"):
            for name in _expanded(str(path)):
                if not glob.has_magic(name):
                    yield Path(name)
                    continue
                parts = Path(os.path.abspath(name)).parts
                yield from (file for file in expected if _fits(Path(os.path.abspath(file)).parts, parts))
                if _format_of(name) != "media":
                    yield from map(Path, glob.iglob(name, recursive=True))


def _fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if a pattern finds a path. Both are absolute, in parts."""
    if not path or not pattern:
        return not path and not pattern
    if pattern[0] == "**":
        return any(_fits(path[start:], pattern[1:] or ("*",)) for start in range(len(path)))
    return fnmatch.fnmatchcase(path[0], pattern[0]) and _fits(path[1:], pattern[1:])


def _expanded(word: str) -> Iterator[str]:
    """Yield the names of a word with ranges, as in WebDataset's shard-{000000..000099}.tar.

    Numbers are as wide as the first of the range.
    """
    match = _RANGE.search(word)
    if match is None:
        yield word
        return
    first, last = int(match[1]), int(match[2])
    step = 1 if first <= last else -1
    for number in range(first, last + step, step):
        yield from _expanded(f"{word[: match.start()]}{number:0{len(match[1])}}{word[match.end() :]}")
