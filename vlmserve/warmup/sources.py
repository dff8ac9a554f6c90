"""What is to be encoded: files, URLs and the lines of manifests, in the order of the command line.

Nothing but names, heads of files and the places of lines is read here, so a long list costs little.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from vlmserve.client.media_names import PICTURES, VIDEOS, begins_as_medium, local_path, scheme_of
from vlmserve.config.checks import SettingsError

_LIST, _REQUESTS = ".txt", ".jsonl"
_SHOWN = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """A picture or video. address: an absolute path, or a URL. place: of its line in a list, as "list.txt:3"."""

    address: str
    place: str | None = None

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.address if len(self.address) <= _SHOWN else f"{self.address[:_SHOWN]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLine:
    """A chat request: line `number` (from 1) of a JSONL file, which begins at byte `offset`."""

    manifest: Path
    number: int
    offset: int

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return str(self.manifest)

    @property
    def place(self) -> str:
        """Of the line, as "requests.jsonl:3"."""
        return f"{self.manifest.name}:{self.number}"


Source: TypeAlias = Medium | RequestLine


def find_sources(words: Sequence[str], stdin: BinaryIO) -> tuple[list[Source], int]:
    """What the words of a command line stand for, and how many files in folders are neither pictures nor videos.
    "-" is a list on `stdin`.

    Raises SettingsError for one that stands for nothing, OSError for a manifest that cannot be read.
    """
    sources: list[Source] = []
    ignored = 0
    for word in words:
        if word == "-":
            sources += _listed(stdin, "-", Path.cwd())
            continue
        if scheme_of(word) and not os.path.lexists(word):
            sources.append(Medium(address=_address(word, Path.cwd())))
            continue
        for path in _matches(word):
            if path.is_dir():
                media, others = _in_folder(path)
                sources += [Medium(address=str(file)) for file in media]
                ignored += others
            elif path.suffix == _LIST:
                with path.open("rb") as file:
                    sources += _listed(file, path.name, path.parent)
            elif path.suffix == _REQUESTS:
                sources += _lines(path)
            else:
                sources.append(Medium(address=str(path)))
    return sources, ignored


def _address(text: str, folder: Path) -> str:
    path = local_path(text, folder)
    return text if path is None else str(path)


def _matches(word: str) -> list[Path]:
    """The file or folder of that name, or those that a pattern stands for."""
    path = Path(word).expanduser().absolute()
    if path.exists():
        return [path]
    found = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(word) else []
    if not found:
        raise SettingsError(f"SOURCE {word!r}: there is no such file or folder")
    return [Path(name) for name in found]


def _in_folder(folder: Path) -> tuple[list[Path], int]:
    """The pictures and videos in a folder and those in it, and how many other files there are. Hidden ones do not
    count."""
    media, others = [], 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if name.startswith(".") or not path.is_file():
                continue
            if path.suffix.lower() in PICTURES + VIDEOS or begins_as_medium(path):
                media.append(path)
            else:
                others += 1
    return media, others


def _listed(lines: Iterable[bytes], name: str, folder: Path) -> Iterator[Medium]:
    for number, line in enumerate(lines, 1):
        text = os.fsdecode(line).strip().removeprefix("\ufeff")
        if text and not text.startswith("#"):
            yield Medium(address=_address(text, folder), place=f"{name}:{number}")


def _lines(manifest: Path) -> Iterator[RequestLine]:
    offset = 0
    with manifest.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield RequestLine(manifest=manifest, number=number, offset=offset)
            offset += len(line)
