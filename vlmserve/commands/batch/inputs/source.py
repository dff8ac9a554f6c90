"""The interface of all kinds of input, and the paths and URLs by which files are named."""

from __future__ import annotations

import importlib.util
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urljoin, urlsplit

from vlmserve.commands.batch.item import Found
from vlmserve.commands.client.media import local_path, scheme_of
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

HTTP = ("http", "https")


class Source(Protocol):
    """The items of one word of the command line."""

    def __iter__(self) -> Iterator[Found]:
        """Yield the items from the beginning. Nothing is read before it is asked for."""
        ...

    def count(self) -> Iterator[int | None]:
        """Yield numbers that add up to the count of items; None, as the last, if only reading everything would tell."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names of the columns of tables, or fields of JSONL items, that have a meaning of their own.

    media: the medium, or its path or URL; None looks for one of the usual names. prompt, id: the item's own. None
    means "prompt" and "id" in JSONL, and no column in tables, where these names often mean something else.
    """

    media: str | None = None
    prompt: str | None = None
    id: str | None = None


def printable(text: str) -> str:
    """Escape the bytes of a file name that are no text: outputs are UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    return text


def resolved(address: str, base: str) -> str:
    """Return the path or URL of an address in a file. base: the folder of that file, as a path or URL.

    Raises BadRequestError for a remote file that names a local one.
    """
    scheme, where = scheme_of(address), scheme_of(base)
    if scheme == "file":
        if where:
            message = f"{address!r}: a file that came by {where} cannot name local files"
            raise BadRequestError(message, code="invalid_media_url")
        return str(local_path(address))
    if scheme:
        return address
    if not where:
        return os.path.join(base, os.path.expanduser(address))
    if where in HTTP:
        return urljoin(f"{base}/", address)
    first, chain, rest = base.partition("::")
    return f"{first}/{address.lstrip('/')}{chain}{rest}"


def folder_of(address: str) -> str:
    """Return the path or URL of the folder that a file is in."""
    scheme = scheme_of(address)
    if not scheme:
        return os.path.dirname(address)
    if scheme in HTTP:
        address = urlsplit(address)._replace(query="", fragment="").geturl()
    first, chain, rest = address.partition("::")
    return posixpath.dirname(first) + chain + rest


def path_in(address: str) -> str:
    """Return the path of a URL; a path stays as it is."""
    scheme = scheme_of(address)
    if scheme in HTTP:
        return unquote(urlsplit(address).path)
    return address.partition("::")[0].partition("://")[2] if scheme else address


def name_fields(id: str, path: str | None) -> dict[str, Any]:
    """Return the fields that every medium has for its prompt. path: None for one without a name."""
    fields: dict[str, Any] = {"id": id}
    if path is not None:
        folder, name = os.path.split(printable(path))
        fields |= {"name": name, "stem": os.path.splitext(name)[0], "folder": os.path.basename(folder)}
    return fields


def reason(error: Exception) -> str:
    """Return the message of an error of the system or of a library."""
    told = getattr(error, "strerror", None)
    if isinstance(error, FileNotFoundError) and not told:
        return "there is no such file or folder"
    return told or str(error) or type(error).__name__


def need(word: str, *packages: str) -> None:
    """Raise SettingsError, naming the package to install, if one is missing. word: the input that needs them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SettingsError(f"INPUT {word!r} needs {package}: pip install 'vlmserve[caption]'")
