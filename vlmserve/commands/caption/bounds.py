"""Which words of a command line may go together: inputs with outputs, and with no output."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from vlmserve.commands.caption.arguments import CaptionCommand
from vlmserve.commands.client.media_names import PICTURES, VIDEOS, scheme_of
from vlmserve.config.checks import SettingsError

_NEED_OUTPUT = (".tar", ".tgz", ".gz", ".parquet", ".pq", ".jsonl", ".ndjson")


def words_to_open(command: CaptionCommand) -> list[str]:
    """The inputs, without the captions that a shell's pattern finds beside the pictures of an earlier run.

    Raises SettingsError for those that captions cannot be put beside.
    """
    words = list(command.inputs)
    if command.output.output is not None:
        return words
    for word in words:
        if scheme_of(word) not in ("", "file") or Path(word).suffix.lower() in _NEED_OUTPUT:
            raise SettingsError(f"INPUT {word!r}: captions cannot be put beside it, name an --output")
    stems = {os.path.splitext(word)[0] for word in words if Path(word).suffix.lower() in (*PICTURES, *VIDEOS)}
    suffix = command.output.suffix
    return [word for word in words if not (word.endswith(suffix) and word.removesuffix(suffix) in stems)]


def refuse_inputs_as_outputs(words: Sequence[str], written: Sequence[Path]) -> None:
    """SettingsError for a file that is to be read and written."""
    for word in words:
        for path in written:
            if os.path.exists(word) and path.exists() and os.path.samefile(word, path):
                raise SettingsError(f"{word!r} is an INPUT, and would be written to: name another file")


def named_folder(word: str) -> Path:
    """The folder that a word of the command line is about: of a pattern, the part without magic."""
    path = Path(word).expanduser()
    if word == "-":
        return Path.cwd()
    if path.is_dir():
        return path
    folder = path.parent
    while not folder.is_dir() and glob.has_magic(str(folder)):
        folder = folder.parent
    return folder
