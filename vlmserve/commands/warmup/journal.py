"""What a run has finished, for the next one to pass over: one line of JSON for each input."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Journal:
    """Lines are appended, and on disk before `add` returns; one that was cut off is passed over.

    settings: text that is another where the same source would become other entries. Raises OSError.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self._settings = settings
        self._finished: dict[str, tuple[bytes, ...]] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        with open(self._fd, "rb", closefd=False) as file:
            data = file.read()
        for line in _whole_lines(data):
            if line.get("settings") == settings:
                self._finished[line["identity"]] = tuple(bytes.fromhex(key) for key in line["keys"])
        if data and not data.endswith(b"\n"):
            self._append(b"\n")

    def finished(self, identity: str) -> tuple[bytes, ...] | None:
        """The keys of the entries that a source was found to need; None if it has not been finished."""
        return self._finished.get(identity)

    def add(self, identity: str, keys: Sequence[bytes], *, source: str) -> None:
        """A source is finished. source: its name, for people."""
        line = {
            "source": source,
            "identity": identity,
            "settings": self._settings,
            "keys": [key.hex() for key in keys],
        }
        self._append(json.dumps(line).encode() + b"\n")
        self._finished[identity] = tuple(keys)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)


def _whole_lines(data: bytes) -> Iterator[dict[str, Any]]:
    for text in data.splitlines():
        try:
            line = json.loads(text)
            if isinstance(line["identity"], str) and all(bytes.fromhex(key) for key in line["keys"]):
                yield line
        except (ValueError, TypeError, KeyError):
            continue
