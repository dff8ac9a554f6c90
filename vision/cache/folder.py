"""The files of an embedding store in their folder, the operations on them, and their limit.

    FOLDER/v1/FINGERPRINT/about.json                 the tower that made the embeddings
    FOLDER/v1/FINGERPRINT/KK/KEY.safetensors         an entry; its modification time is when it was last used
    FOLDER/v1/FINGERPRINT/KK/KEY.pin                 the entry is never evicted
    FOLDER/v1/lock                                   held while entries are evicted or pinned

FINGERPRINT and KEY are hexadecimal. KK is the start of KEY.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from vision.cache.durable_file import is_temporary, locked_file, make_folder, remove_abandoned, write_file
from vlmserve_common.files import flush_folder

_ENTRY, _PIN, _ABOUT = ".safetensors", ".pin", "about.json"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """An entry's file. `fingerprint`, `key`: hexadecimal. `bytes`: of its file. `used`: seconds since 1970, never later
    than now."""

    fingerprint: str
    key: str
    path: Path
    bytes: int
    used: float
    pinned: bool


class EmbeddingFolder:
    """A store's folder. It keeps nothing in memory, so threads and processes can share it.

    Methods raise OSError, but not for a file that vanishes meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "v1"

    def path(self, fingerprint: bytes, key: bytes) -> Path:
        """Return the path of an entry, whether or not it exists."""
        name = key.hex()
        return self.root / fingerprint.hex() / name[:2] / f"{name}{_ENTRY}"

    def describe(self, fingerprint: str, about: Mapping[str, str], *, now_s: float) -> None:
        """Make a fingerprint's folder and its about.json, unless they exist."""
        folder = self.root / fingerprint
        make_folder(folder)
        if not self.about(fingerprint):
            text = json.dumps({**about, "fingerprint": fingerprint}, indent=2, sort_keys=True) + "\n"
            write_file(folder / _ABOUT, [text.encode()], time_s=now_s)

    def fingerprints(self) -> list[str]:
        """List the towers that have embeddings here, in order."""
        return sorted(item.name for item in _listed(self.root) if _HEX.fullmatch(item.name))

    def about(self, fingerprint: str) -> dict[str, str]:
        """Read about.json; {} if it is missing or broken."""
        try:
            about = json.loads((self.root / fingerprint / _ABOUT).read_bytes())
        except (OSError, ValueError):
            return {}
        return {str(name): str(value) for name, value in about.items()} if isinstance(about, dict) else {}

    def entries(self, *, now_s: float) -> Iterator[StoredEntry]:
        """Yield every entry, in no order. `now_s`: seconds since 1970."""
        for fingerprint in self.fingerprints():
            for part in _listed(self.root / fingerprint):
                names = {item.name: item for item in _listed(Path(part.path))}
                for name, item in names.items():
                    key = name.removesuffix(_ENTRY)
                    if key == name or not _HEX.fullmatch(key):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = item.stat()
                        yield StoredEntry(
                            fingerprint=fingerprint,
                            key=key,
                            path=Path(item.path),
                            bytes=status.st_size,
                            used=min(status.st_mtime, now_s),
                            pinned=key + _PIN in names,
                        )

    def locked(self, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """Hold the folder's lock. The context is True if it is held. `wait`: wait until it is free."""
        return locked_file(self.root / "lock", wait=wait)

    def pin(self, path: Path) -> bool:
        """Keep the entry at a path from being evicted, whether or not it exists yet. Returns True if it was not pinned
        before.

        It waits for an eviction under way, so an entry that exists afterwards continues to exist.
        """
        with self.locked(wait=True):
            try:
                os.close(os.open(path.with_suffix(_PIN), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:
                return False
            flush_folder(path.parent)
            return True

    def unpin(self, path: Path) -> None:
        """Let the entry at a path be evicted again."""
        path.with_suffix(_PIN).unlink(missing_ok=True)

    def evict(self, entries: Iterable[StoredEntry]) -> list[StoredEntry]:
        """Remove entries and their pins; return the entries that were there.

        The caller must hold the lock since before it listed them.
        """
        gone = []
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                entry.path.unlink()
                gone.append(entry)
            if entry.pinned:
                self.unpin(entry.path)
        return gone

    def sweep(self, *, now_s: float) -> None:
        """Remove unfinished files of writers that are gone."""
        for fingerprint in self.fingerprints():
            for part in _listed(self.root / fingerprint):
                for item in [part, *_listed(Path(part.path))]:
                    if is_temporary(item.name):
                        remove_abandoned(Path(item.path), now_s=now_s)

    def remove_empty(self, fingerprint: str, *, unpin: bool = False) -> None:
        """Remove a fingerprint's folder if it has no entry and no pin. `unpin`: remove its pins first.

        The caller must hold the lock. A running store makes the folder again when it needs it.
        """
        folder = self.root / fingerprint
        for part in _listed(folder):
            for item in _listed(Path(part.path)) if unpin else ():
                if item.name.endswith(_PIN):
                    Path(item.path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.rmdir(part.path)
        if [item.name for item in _listed(folder)] == [_ABOUT]:
            (folder / _ABOUT).unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()


def least_recently_used(entries: Iterable[StoredEntry], surplus: int) -> list[StoredEntry]:
    """Return the entries unused for longest that take at least `surplus` bytes together, or all entries."""
    chosen = []
    for entry in sorted(entries, key=lambda entry: (entry.used, entry.path)):
        if surplus <= 0:
            break
        chosen.append(entry)
        surplus -= entry.bytes
    return chosen


def remove_damaged(path: Path, file: FileIO) -> bool:
    """Remove the file at a path if it is still the open one; return True if it was. Raises OSError.

    A good file written between the two calls is lost, as if it were evicted.
    """
    try:
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except (FileNotFoundError, NotADirectoryError):
        return []


_REFUSE_FOR_S = 10.0  # a look at the whole folder for every refused entry would be too much


class FolderLimit:
    """One process's view of the limit. One thread at a time may use it.

    It counts its own writes, and lists the folder again before they reach a sixteenth of the limit. That bounds how far
    several processes exceed the limit. `bytes`, `entries`: at the last listing, plus own writes since. `evictions`: in
    all.
    """

    def __init__(self, folder: EmbeddingFolder, limit_bytes: int, clock: Callable[[], float]) -> None:
        self.bytes = 0
        self.entries = 0
        self.evictions = 0
        self._folder = folder
        self._limit = limit_bytes
        self._clock = clock
        self._room = 0
        self._refuse_until = 0.0  # monotonic seconds

    def make_room(self, need: int) -> bool:
        """Evict the entries unused for longest until `need` bytes fit. False if pinned entries leave too little. Raises
        OSError.

        Eviction continues to nine tenths of the limit, so that the next entries need none.
        """
        if 0 < need <= self._room:
            return True
        if time.monotonic() < self._refuse_until:
            return False
        self.look()
        if self.bytes + need > self._limit:
            with self._folder.locked(wait=False) as held:
                if not held:
                    return True  # another process makes room at this moment
                self._evict(need)
        self._room = min(self._limit - self.bytes, self._limit // 16)
        if self.bytes + need > self._limit:
            self._refuse_until = time.monotonic() + _REFUSE_FOR_S
            return False
        return True

    def wrote(self, size: int) -> None:
        """Count a new entry of so many bytes."""
        self.entries += 1
        self.bytes += size
        self._room -= size

    def look(self) -> list[StoredEntry]:
        """List all entries. Raises OSError."""
        entries = list(self._folder.entries(now_s=self._clock()))
        self.entries = len(entries)
        self.bytes = _sum(entries)
        return entries

    def _evict(self, need: int) -> None:
        self._folder.sweep(now_s=self._clock())
        loose = [entry for entry in self.look() if not entry.pinned]
        total = self.bytes + need
        if total - _sum(loose) <= self._limit < total:
            chosen = least_recently_used(loose, total - self._limit * 9 // 10)
            self.evictions += len(self._folder.evict(chosen))
            self.entries -= len(chosen)
            self.bytes -= _sum(chosen)


def _sum(entries: list[StoredEntry]) -> int:
    return sum(entry.bytes for entry in entries)
