"""Chooses the output of a command line, and the place of its journal."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from vlmserve.commands.caption.feed import ItemShard
from vlmserve.commands.caption.outputs.base import JsonLinesOutput, Output, PartNames
from vlmserve.commands.caption.outputs.parts import Parquet, Tars
from vlmserve.commands.caption.outputs.sidecars import Sidecars
from vlmserve.config.checks import SettingsError

_NUMBER = re.compile(r"%0?\d*d")
_LINES, _PARQUET, _TAR = (".jsonl", ".ndjson"), ".parquet", ".tar"
_JOURNAL = ".vlmserve-caption"


def choose_output(output: str | None, *, suffix: str, overwrite: bool, items_per_file: int) -> Output:
    """Make the output that the name asks for; None puts captions beside the files.

    suffix, overwrite: see `Sidecars`. items_per_file: items in a part of parquet or tars. Raises SettingsError for a
    name of no known form.
    """
    kind = "folder" if output is None else _kind(output)
    if output is None or kind == "folder":
        return Sidecars(None if output is None else Path(output), suffix=suffix, overwrite=overwrite)
    if kind in _LINES:
        return JsonLinesOutput(Path(output))
    parts = Parquet if kind == _PARQUET else Tars
    return parts(PartNames(output), items_per_file=items_per_file)


def choose_journal(output: str | None, folders: Sequence[Path], shard: ItemShard) -> Path:
    """Return the path of the journal: beside the output, or in it if it is a folder.

    folders: of the local files, if there is no output. The journal goes to the folder that holds them all, or to the
    current one if only the root does.
    """
    part = f"-{shard.index}-of-{shard.count}" if shard.count > 1 else ""
    if output is None:
        common = Path(os.path.commonpath([folder.absolute() for folder in folders])) if folders else Path.cwd()
        return (Path.cwd() if common == Path(common.root) else common) / f"{_JOURNAL}{part}.journal"
    if _kind(output) == "folder":
        return Path(output) / f"{_JOURNAL}{part}.journal"
    path = Path(_NUMBER.sub("N", output))
    return path.with_name(f"{path.name}.journal")


def _kind(name: str) -> str:
    """Return the suffix, or "folder"."""
    path = Path(name)
    numbers = _NUMBER.findall(path.name)
    suffix = path.suffix.lower()
    if path.is_dir() or name.endswith("/") or not suffix:
        if path.exists() and not path.is_dir():
            raise SettingsError(f"--output is {name!r}, which is there and no folder")
        return "folder"
    if suffix not in (*_LINES, _PARQUET, _TAR):
        raise SettingsError(
            f"--output is {name!r}; it must end with .jsonl, .parquet or .tar, or be a folder (with / at its end)"
        )
    if suffix in _LINES and numbers:
        raise SettingsError(f"--output is {name!r}; lines of JSON are one file, without a number in its name")
    if suffix in _LINES:
        return suffix
    if path.name.count("%") != len(numbers) or len(numbers) > 1 or "%" in str(path.parent):
        raise SettingsError(f"--output is {name!r}; a number of parts is written %05d, once, in the file's name")
    return suffix
