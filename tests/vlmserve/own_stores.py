"""Stores of a test: in a folder, or in a database and a folder that others may open, too."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from vlmserve.api.stores.opening import Stores, open_stores
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings


def own_stores(folder: Path, stack: ExitStack, database_url: str | None = None) -> Stores:
    """database_url: without it, the stores are the folder's alone."""
    folder.mkdir(exist_ok=True)
    places = (
        {"file_store_dir": str(folder)}
        if database_url is None
        else {"database_url": database_url, "file_store_url": f"local://{folder}"}
    )
    return open_stores(ServerSettings(engine=EngineArgs(model="m"), **places), stack)
