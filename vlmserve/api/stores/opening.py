"""The stores that the settings choose: a folder of this server alone, or stores that several servers share."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlmserve.api.stores.contents import Contents, FolderContents, FsspecContents
from vlmserve.api.stores.postgres import Postgres, check_database_url
from vlmserve.api.stores.rows import Database
from vlmserve.api.stores.sqlite import SqliteDatabase
from vlmserve.config.settings import ServerSettings
from vlmserve.ipc.private_dir import PrivateDirectory
from vlmserve_common.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Where a server keeps files, batches and responses. database: opens tables, given their name and what creates
    them. contents: the bytes of files."""

    database: Callable[[str, str], Database]
    contents: Contents


def check_stores(settings: ServerSettings) -> None:
    """Raise SettingsError if a library that the settings need is not installed, or a URL cannot be read."""
    if settings.database_url is not None:
        check_database_url(settings.database_url)
    if settings.file_store_url is not None:
        FsspecContents(settings.file_store_url)


def open_stores(settings: ServerSettings, stack: ExitStack) -> Stores:
    """Open the stores, which `stack` closes. A private folder is removed then. Raises EngineError for stores that
    cannot be used, and for a folder that another server uses."""
    folder = None if settings.database_url is not None else _own_folder(settings, stack)
    contents: Contents
    if settings.file_store_url is not None:
        contents = FsspecContents(settings.file_store_url)
        name = f"try-{secrets.token_hex(16)}"
        contents.settle(contents.create(name))
        contents.remove(name)
    else:
        assert folder is not None, "the settings were checked"
        contents = FolderContents(folder)
    if folder is not None:
        return Stores(database=partial(SqliteDatabase, folder), contents=contents)
    assert settings.database_url is not None
    server = Postgres(settings.database_url)
    stack.callback(server.close)
    return Stores(database=server.database, contents=contents)


def _own_folder(settings: ServerSettings, stack: ExitStack) -> Path:
    """Return the folder of this server, which no other server can use until `stack` ends."""
    if settings.file_store_dir is None:
        folder = stack.enter_context(PrivateDirectory(Path(tempfile.gettempdir()), "vlmserve-files")).path / "files"
        folder.mkdir()
    else:
        folder = Path(settings.file_store_dir)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"the folder {folder} for uploaded files cannot be opened: {error.strerror}") from None
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise EngineError(
            f"the folder {folder} for uploaded files is in use by another server (setting --file-store-dir)"
        ) from None
    return folder
