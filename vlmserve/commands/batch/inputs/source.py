"""What every kind of input has in common."""

from __future__ import annotations

import importlib.util
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urljoin, urlsplit

from vlmserve.commands.batch.item import Found
from vlmserve.commands.client.media_names import local_path, scheme_of
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

HTTP = ("http", "https")


class Source(Protocol):
    """What one word of the command line stands for."""

    def __iter__(self) -> Iterator[Found]:
        """From the beginning; nothing is read before it is asked for."""
        ...

    def count(self) -> Iterator[int | None]:
        """How many there are, in parts to be added up; None, and no more, where only reading it all would tell."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which fields of a table's rows, or of a JSONL file's items, have a meaning of their own.

    media: the medium, or its path or URL; None looks for one of the usual names. prompt, id: the item's own; None is
    "prompt" and "id" in JSONL, and none in tables, where such columns are often about something else.
    """

    media: str | None = None
    prompt: str | None = None
    id: str | None = None


def printable(text: str) -> str:
    """File names may hold bytes that are no text: outputs are UTF-8 all the same."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    return text


def resolved(address: str, base: str) -> str:
    """The path or URL that an address in a file stands for. base: the folder of that file, as path or URL.

    Raises BadRequestError for a remote file that names a local one.
    """
    scheme, where = scheme_of(address), scheme_of(base)
    if scheme == "file":
        if where:
            raise BadRequestError(
                f"{address!r}: what came by {where} cannot name local files", code="invalid_media_url"
            )
        return str(local_path(address, Path()))
    if scheme:
        return address
    if not where:
        return os.path.join(base, os.path.expanduser(address))
    if where in HTTP:
        return urljoin(f"{base}/", address)
    first, chain, rest = base.partition("::")
    return f"{first}/{address.lstrip('/')}{chain}{rest}"


def folder_of(address: str) -> str:
    """The path or URL of the folder that a file is in."""
    scheme = scheme_of(address)
    if not scheme:
        return os.path.dirname(address)
    if scheme in HTTP:
        address = urlsplit(address)._replace(query="", fragment="").geturl()
    first, chain, rest = address.partition("::")
    return posixpath.dirname(first) + chain + rest


def path_in(address: str) -> str:
    """What of a path or URL is a path."""
    scheme = scheme_of(address)
    if scheme in HTTP:
        return unquote(urlsplit(address).path)
    return address.partition("::")[0].partition("://")[2] if scheme else address


def name_fields(id: str, path: str | None) -> dict[str, Any]:
    """What a prompt may use of every medium, as far as it has a name."""
    fields: dict[str, Any] = {"id": id}
    if path is not None:
        folder, name = os.path.split(printable(path))
        fields |= {"name": name, "stem": os.path.splitext(name)[0], "folder": os.path.basename(folder)}
    return fields


def reason(error: Exception) -> str:
    """What an error of the system, or of a library, says."""
    told = getattr(error, "strerror", None)
    if isinstance(error, FileNotFoundError) and not told:
        return "there is no such file or folder"
    return told or str(error) or type(error).__name__


def need(word: str, *packages: str) -> None:
    """Raises SettingsError, with what to install, unless they are there. word: the input that needs them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SettingsError(f"INPUT {word!r} needs {package}: pip install 'vlmserve[caption]'")
