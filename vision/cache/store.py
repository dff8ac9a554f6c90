"""The disk tier of the embedding cache: embeddings by key, in plain files that outlive the server.

It is a cache: a problem with a file, the folder or the disk costs the entry and never the request. Several processes
can use one folder without knowing of each other; `EmbeddingFolder` describes its layout.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

import torch

from vision.cache.durable_file import make_folder, write_file
from vision.cache.entry_file import KEY_BYTES, DamagedEntryError, EmbedsFormat, entry_header, read_entry
from vision.cache.folder import EmbeddingFolder, FolderLimit, remove_damaged
from vision.cache.stats import TierStats
from vlmserve_common.errors import EngineError
from vlmserve_common.files import flush_folder

logger = logging.getLogger(__name__)

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MARK_EVERY_S = 60.0


class EmbeddingStore:
    """Embeddings of one tower, in a folder that other towers and processes can use too. Thread-safe.

    `fingerprint`: 32 bytes that identify the tower. `limit_bytes`: for all entries in the folder together. Each further
    process that writes at the same time may exceed it by about a sixteenth. `about`: a description of the tower for
    people (model, family, dtype, row_width, version). `clock`: seconds since 1970; if it jumps, only the order of
    eviction suffers. `trouble`: why the last read or write failed, for people; "" if all is well.

    Raises EngineError when the folder cannot be used. A folder that can only be read is used for reading, with a
    warning.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: bytes,
        limit_bytes: int,
        about: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.trouble = ""
        self._folder = EmbeddingFolder(folder)
        self._name = f"the embedding cache in {folder}"
        self._fingerprint = _checked(fingerprint)
        self._about = dict(about)
        self._clock = clock
        self._read_only = False
        self._lock = threading.Lock()  # of the next three
        self._hits = self._misses = 0
        self._warned: set[str] = set()
        self._writing = threading.Lock()  # one thread at a time; of the next one
        self._limit = FolderLimit(self._folder, limit_bytes, clock)
        self._open(folder)

    def get(self, key: bytes) -> torch.Tensor | None:
        """Return the stored embeddings [n, width] on the CPU, in memory of their own; None if they are not here.

        A damaged file is removed.
        """
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                try:
                    form, data = read_entry(file, key)
                except DamagedEntryError as error:
                    self._remove_damaged(path, file, error)
                    return None
                status = os.fstat(file.fileno())
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._complain("read", error)
            self._count(hit=False)
            return None
        self._mark(path, status.st_mtime)
        self._count(hit=True)
        return torch.from_numpy(data).view(_DTYPES[form.dtype]).view(form.rows, form.width)

    def __contains__(self, key: bytes) -> bool:
        """Return True if there is a file of this key. It may still turn out damaged."""
        return os.path.exists(self._path(key))

    def put(self, key: bytes, embeds: torch.Tensor, *, pin: bool = False) -> bool:
        """Store embeddings [n, width] (bfloat16, float16 or float32). `pin`: never evict them. Takes as long as the
        disk.

        True: they are on disk, whichever process wrote them. False: there is no room, or the folder cannot be written.
        """
        path = self._path(key)
        form, data = _packed(embeds)
        try:
            with self._writing:
                return self._put(key, path, form, data, pin)
        except OSError as error:
            self._complain("written", error)
            return False

    def stats(self) -> TierStats:
        """Return this process's counts, and the folder's bytes and entries (last listing plus own writes since)."""
        limit = self._limit
        with self._lock:
            return TierStats(
                hits=self._hits,
                misses=self._misses,
                evictions=limit.evictions,
                bytes=limit.bytes,
                entries=limit.entries,
            )

    def _open(self, folder: Path) -> None:
        try:
            make_folder(folder, mode=0o700)  # an embedding tells much of its picture
            os.listdir(folder)
            self._prepare()
        except OSError as error:
            place = error.filename or folder
            raise EngineError(
                f"the folder {folder} for embeddings cannot be used: {place}: {error.strerror} "
                "(setting --embedding-cache-dir)"
            ) from None

    def _prepare(self) -> None:
        root = self._folder.root
        try:
            self._folder.describe(self._fingerprint.hex(), self._about, now_s=self._clock())
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root))
            self._folder.sweep(now_s=self._clock())
            self._limit.make_room(0)
        except OSError as error:
            if error.errno not in _READ_ONLY | _FULL:
                raise
            self._read_only = error.errno in _READ_ONLY
            if self._read_only:
                self._warn_once("read-only", f"can only be read: {error}")
            else:
                self._complain("written", error)
            self._limit.look()

    def _path(self, key: bytes) -> Path:
        return self._folder.path(self._fingerprint, _checked(key))

    def _put(self, key: bytes, path: Path, form: EmbedsFormat, data: memoryview, pin: bool) -> bool:
        if self._read_only:
            return not pin and _is_good(path, key)
        if not path.parent.is_dir():
            self._folder.describe(self._fingerprint.hex(), self._about, now_s=self._clock())
            make_folder(path.parent)
        pinned = pin and self._folder.pin(path)
        stored = False
        try:
            stored = _is_good(path, key) or self._write(path, entry_header(key, form, data), data)
        finally:
            if pinned and not stored:
                self._folder.unpin(path)
        return stored

    def _write(self, path: Path, header: bytes, data: memoryview) -> bool:
        size = len(header) + len(data)
        if size > self.limit_bytes:
            self._warn_once("large", f"takes no entry of {size} bytes: its limit is {self.limit_bytes}")
            return False
        if not self._limit.make_room(size):
            self._warn_once("full", f"is full: pinned entries leave no {size} bytes under {self.limit_bytes}")
            return False
        write_file(path, [header, data], time_s=self._clock())
        self._limit.wrote(size)
        return True

    def _remove_damaged(self, path: Path, file: FileIO, error: DamagedEntryError) -> None:
        self._count(hit=False)
        if self._read_only:
            return
        try:
            if remove_damaged(path, file):
                logger.warning("%s was damaged (%s) and is removed", path, error)
        except OSError as failure:
            self._complain("written", failure)

    def _mark(self, path: Path, used: float) -> None:
        """Record that an entry is used now."""
        now = self._clock()
        if abs(now - used) >= _MARK_EVERY_S:
            with contextlib.suppress(OSError):  # evicted, or not ours to write
                os.utime(path, (now, now))

    def _count(self, *, hit: bool) -> None:
        with self._lock:
            self._hits += hit
            self._misses += not hit

    def _complain(self, done: str, error: OSError) -> None:
        self._warn_once(f"{done} {error.errno}", f"cannot be {done}, going on without: {error}")
        self.trouble = f"{self._name} cannot be {done}: {error}"

    def _warn_once(self, kind: str, what: str) -> None:
        self.trouble = text = f"{self._name} {what}"
        with self._lock:
            known = kind in self._warned
            self._warned.add(kind)
        if not known:
            logger.warning("%s", text)


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; {KEY_BYTES} are expected")
    return key


def _packed(embeds: torch.Tensor) -> tuple[EmbedsFormat, memoryview]:
    if embeds.dim() != 2 or not embeds.numel() or embeds.dtype not in _NAMES:
        raise ValueError(f"embeddings of shape {list(embeds.shape)} in {embeds.dtype} cannot be stored")
    data = embeds.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return EmbedsFormat(dtype=_NAMES[embeds.dtype], rows=embeds.shape[0], width=embeds.shape[1]), data


def _is_good(path: Path, key: bytes) -> bool:
    """Return True if an entry is there and whole. It is then also on disk."""
    try:
        with path.open("rb", buffering=0) as file:
            read_entry(file, key)
    except (DamagedEntryError, FileNotFoundError):
        return False
    flush_folder(path.parent)
    return True
