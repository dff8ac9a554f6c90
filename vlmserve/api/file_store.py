"""Uploaded files: on disk, under names of our own, each found by its owner only.

A file is two: FILE_ID.bin with its bytes, and FILE_ID.json with its description. An upload is written in this order:
bytes grow in a file with another ending -> the file is flushed to disk and renamed -> the description is written the
same way. A file exists once it has a description. Bytes without one are unfinished, and removed at the next start. A
deletion goes backwards.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from processors.fetch.fetching import MediaFile
from processors.fetch.limits import ByteLimit
from processors.formats import HEAD_BYTES, modality_of
from processors.inputs import Modality
from vlmserve.api.api_keys import share_of
from vlmserve.api.errors import not_found
from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.threads import Threads

logger = logging.getLogger(__name__)

_THREADS = 8  # uploads that are written at a time
_OURS = re.compile(r"(file-[0-9a-f]{32})\.(bin|json|part)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """The description of a file. owner: who may use it. created_at, expires_at: seconds since 1970. sequence: its place
    in the order of uploads. filename: the client's name for it, without a meaning here. modality: found in the first
    bytes at every start."""

    id: str
    owner: str
    bytes: int
    created_at: int
    expires_at: int | None
    sequence: int
    filename: str
    purpose: str
    modality: Modality | None


class FileStore:
    """A thread-safe store. One store at a time uses a folder, which must exist; EngineError otherwise.

    settings: the limits, in which unfinished uploads count. clock: seconds since 1970. folder: belongs to this store
    alone. threads: for its work. shared: each owner has its own share of the limits.
    """

    def __init__(self, folder: Path, settings: ServerSettings, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.threads = Threads("files", _THREADS)
        self.shared = False
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, FileRecord] = {}
        self._uploads: Counter[str] = Counter()  # unfinished ones of each owner
        self._bytes: Counter[str] = Counter()  # of each owner, those of unfinished uploads too
        self._folder_fd = _lock_folder(folder)
        self._load()

    def begin(self, owner: str) -> Upload:
        """Begin an upload, which must be closed in any case. Raises BadRequestError if the store has too many files."""
        with self._lock:
            self._drop_expired()
            held = self._uploads + Counter(record.owner for record in self._records.values())
            count, most, limit = share_of(self._settings.max_files, held, owner, shared=self.shared)
            if count >= most:
                raise BadRequestError(
                    f"there are {count} files, the limit is {limit} (setting --max-files); delete some",
                    code="too_many_files",
                )
            self._uploads[owner] += 1
        file_id = "file-" + secrets.token_hex(16)
        try:
            return Upload(self, file_id, owner, _create(self.folder / f"{file_id}.part"))
        except BaseException:
            self._release(owner, 0)
            raise

    def files(self, owner: str) -> list[FileRecord]:
        """Return an owner's files, the oldest first."""
        with self._lock:
            self._drop_expired()
            return sorted((r for r in self._records.values() if r.owner == owner), key=lambda r: r.sequence)

    def find(self, owner: str, file_id: str) -> FileRecord:
        """Return a file. Raises BadRequestError (404) for an unknown file and for a file of another owner alike."""
        with self._lock:
            self._drop_expired()
            record = self._records.get(file_id)
        if record is None or record.owner != owner:
            raise not_found("file", file_id)
        return record

    def open(self, owner: str, file_id: str) -> tuple[FileRecord, BinaryIO]:
        """Return a file's record and bytes, which stay readable while they are open. Raises BadRequestError (404)."""
        record = self.find(owner, file_id)
        try:
            return record, (self.folder / f"{file_id}.bin").open("rb")
        except FileNotFoundError:  # deleted meanwhile
            raise not_found("file", file_id) from None

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises BadRequestError (404)."""
        record = self.find(owner, file_id)
        with self._lock:
            if self._records.pop(file_id, None) is None:
                raise not_found("file", file_id)
            self._remove(record)

    def for_owner(self, owner: str) -> Callable[[str], StoredFile]:
        """Return a function that finds an owner's files by their ids, as media. It raises BadRequestError (404)."""
        return lambda file_id: StoredFile(self, self.find(owner, file_id))

    def close(self) -> None:
        """Let another store use the folder. Files stay."""
        self.threads.close()
        os.close(self._folder_fd)

    @property
    def bytes(self) -> int:
        """The bytes of files and unfinished uploads."""
        return self._bytes.total()

    def reserve(self, owner: str, count: int) -> None:
        """Make room for `count` more bytes of an upload. Raises BadRequestError if there is none."""
        total = self._settings.max_file_store_bytes
        with self._lock:
            taken, most, limit = share_of(total, self._bytes, owner, shared=self.shared)
            if taken + count > most:
                raise BadRequestError(
                    f"the uploaded files would take {taken + count} bytes, the limit is {limit} (setting "
                    "--max-file-store-bytes); delete some",
                    code="file_store_full",
                )
            self._bytes[owner] += count

    def commit(self, upload: Upload, *, filename: str, purpose: str, expire_after_s: float | None) -> FileRecord:
        """Make an upload a file. Called by `Upload.commit` only."""
        part, final = (self.folder / f"{upload.id}.{ending}" for ending in ("part", "bin"))
        with part.open("rb") as file:
            head = file.read(HEAD_BYTES)
        expire_after_s = self._settings.file_expire_after_s if expire_after_s is None else expire_after_s
        now = self._clock()
        with self._lock:
            record = FileRecord(
                id=upload.id,
                owner=upload.owner,
                bytes=upload.bytes,
                created_at=int(now),
                expires_at=None if expire_after_s is None else int(now + expire_after_s),
                sequence=1 + max((r.sequence for r in self._records.values()), default=0),
                filename=filename,
                purpose=purpose,
                modality=modality_of(head),
            )
            part.replace(final)
            try:
                _write_whole(self.folder / f"{upload.id}.json", json.dumps(_described(record)).encode())
                os.fsync(self._folder_fd)
            except BaseException:
                final.unlink(missing_ok=True)
                raise
            self._records[record.id] = record
            self._uploads[record.owner] -= 1
        return record

    def abandon(self, upload: Upload) -> None:
        """Forget an upload that was not committed. Called by `Upload.close` only."""
        (self.folder / f"{upload.id}.part").unlink(missing_ok=True)
        self._release(upload.owner, upload.bytes)

    def check_size(self, size: int) -> None:
        """Raise BadRequestError (413) for a file of more bytes than one may have."""
        if size > self._settings.max_file_bytes:
            raise BadRequestError(
                f"the file is larger than {self._settings.max_file_bytes} bytes (setting --max-file-bytes)",
                param="file",
                code="file_too_large",
                status=413,
            )

    def _release(self, owner: str, count: int) -> None:
        with self._lock:
            self._uploads[owner] -= 1
            self._bytes[owner] -= count

    def _drop_expired(self) -> None:
        now = self._clock()
        for record in [r for r in self._records.values() if r.expires_at is not None and r.expires_at <= now]:
            del self._records[record.id]
            self._remove(record)

    def _remove(self, record: FileRecord) -> None:
        """Remove a file from disk, which has left the records."""
        for ending in ("json", "bin"):  # in this order: see above
            (self.folder / f"{record.id}.{ending}").unlink(missing_ok=True)
        self._bytes[record.owner] -= record.bytes

    def _load(self) -> None:
        found: dict[str, set[str]] = {}
        for path in self.folder.iterdir():
            match = _OURS.fullmatch(path.name)
            if match:
                found.setdefault(match.group(1), set()).add(match.group(2))
        for file_id, endings in found.items():
            if "json" not in endings:
                for ending in endings:
                    (self.folder / f"{file_id}.{ending}").unlink(missing_ok=True)
                logger.info("removed %s from %s: its upload was not finished", file_id, self.folder)
            elif (record := self._read(file_id)) is None:
                logger.warning("%s in %s is damaged and left alone", file_id, self.folder)
            else:
                self._records[file_id] = record
                self._bytes[record.owner] += record.bytes
        self._drop_expired()

    def _read(self, file_id: str) -> FileRecord | None:
        try:
            with (self.folder / f"{file_id}.bin").open("rb") as file:
                modality, size = modality_of(file.read(HEAD_BYTES)), os.fstat(file.fileno()).st_size
            raw = json.loads((self.folder / f"{file_id}.json").read_bytes())
            record = FileRecord(**raw, modality=modality)
        except (OSError, TypeError, ValueError):
            return None
        return record if (record.id, record.bytes) == (file_id, size) else None


class Upload(AbstractContextManager["Upload"]):
    """A file being written; a context manager that leaves nothing behind unless it was committed.

    Its methods may be called in different threads, even while one of them is still at work.
    """

    def __init__(self, store: FileStore, file_id: str, owner: str, file: BinaryIO) -> None:
        self.id = file_id
        self.owner = owner
        self.bytes = 0
        self._store = store
        self._file = file
        self._lock = threading.Lock()
        self._open = True

    def write(self, data: bytes) -> None:
        """Append bytes. Raises BadRequestError at a limit."""
        with self._lock:
            if not self._open:
                raise ValueError("the upload is closed")
            self._store.check_size(self.bytes + len(data))
            self._store.reserve(self.owner, len(data))
            self.bytes += len(data)
            self._file.write(data)

    def commit(self, *, filename: str, purpose: str, expire_after_s: float | None = None) -> FileRecord:
        """Make the upload a file. expire_after_s: seconds to keep it; None: as the settings say."""
        with self._lock:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            record = self._store.commit(self, filename=filename, purpose=purpose, expire_after_s=expire_after_s)
            self._open = False
            return record

    def close(self) -> None:
        """Forget the bytes, unless the upload was committed."""
        with self._lock:
            if self._open:
                self._open = False
                try:
                    self._file.close()
                except OSError as error:  # the last bytes do not fit on the disk
                    logger.debug("closing an upload: %s", error)
                finally:
                    self._store.abandon(self)

    def __exit__(self, *_: object) -> None:
        self.close()


class StoredFile(MediaFile):
    """An uploaded file as a picture or a video of a request."""

    def __init__(self, store: FileStore, record: FileRecord) -> None:
        self.record = record
        self.modality = record.modality
        self._store = store

    def read(self, limit: ByteLimit) -> bytes:
        """Return the bytes, as `MediaFile.read` does."""
        record = self.record
        if record.bytes > limit.bytes:
            raise BadRequestError(
                f"the file {record.id} has {record.bytes} bytes, the limit is {limit.bytes} (setting {limit.setting})",
                code="invalid_media_url",
            )
        _, file = self._store.open(record.owner, record.id)
        with file:
            return file.read()


def _lock_folder(folder: Path) -> int:
    """Return an open descriptor of the folder, which keeps other stores out of it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"the folder {folder} for uploaded files cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise EngineError(
            f"the folder {folder} for uploaded files is in use by another server (setting --file-store-dir)"
        ) from None
    return fd


def _create(path: Path) -> BinaryIO:
    """Create a file that only this user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader, even after a crash, sees all of it or none."""
    unfinished = path.with_suffix(".part")
    try:
        with _create(unfinished) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _described(record: FileRecord) -> dict[str, object]:
    return {name: value for name, value in asdict(record).items() if name != "modality"}
