"""Uploaded files: a row that describes each, and its bytes, which its owner only can find.

A row is there before its bytes, and after them. An upload is a row that is not ready; it becomes a file when its bytes
are complete. A file that is deleted is a row that is not ready again, until its bytes are removed. Rows that are not
ready expire, as files may: whatever ends a server, another one, or the next, removes what it left. Each expired row is
claimed first, so that one server removes it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import BinaryIO

from processors.fetch.fetching import MediaFile
from processors.fetch.limits import ByteLimit
from processors.formats import HEAD_BYTES, modality_of
from processors.inputs import Modality
from vlmserve.api.api_keys import share_of
from vlmserve.api.errors import not_found
from vlmserve.api.stores.opening import Stores
from vlmserve.api.stores.rows import STORE_ERRORS
from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.threads import Threads

logger = logging.getLogger(__name__)

_THREADS = 8  # uploads that are written at a time
_UPLOAD_S = 3600  # after its last bytes, an upload is one that a server left
_REMOVAL_S = 60  # for removing bytes, after which another server may try
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq {key}, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, bytes BIGINT NOT NULL, ready INTEGER NOT NULL,
    expires_at BIGINT, record TEXT NOT NULL
)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """The description of a file. owner: who may use it. created_at, expires_at: seconds since 1970. filename: the
    client's name for it, without a meaning here. modality: found in the first bytes."""

    id: str
    owner: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    modality: Modality | None


class FileStore:
    """The files in stores, for many threads. Its methods raise StoreUnavailableError.

    settings: the limits, in which unfinished uploads count. clock: seconds since 1970. threads: for its work. shared:
    each owner has its own share of the limits.
    """

    def __init__(self, stores: Stores, settings: ServerSettings, *, clock: Callable[[], float] = time.time) -> None:
        self.threads = Threads("files", _THREADS)
        self.shared = False
        self._settings = settings
        self._clock = clock
        self._contents = stores.contents
        self._database = stores.database("files", _SCHEMA)
        if not self._database.replicated:
            with self._database.transaction() as rows:
                rows.run("UPDATE files SET expires_at = 0 WHERE ready = 0")
        self._drop_expired()

    def begin(self, owner: str) -> Upload:
        """Begin an upload, which must be closed in any case. Raises BadRequestError if the store has too many files."""
        self._drop_expired()
        file_id = "file-" + secrets.token_hex(16)
        with self._database.transaction(alone=True) as rows:
            held = dict(rows.find("SELECT owner, count(*) FROM files GROUP BY owner"))
            count, most, limit = share_of(self._settings.max_files, held, owner, shared=self.shared)
            if count >= most:
                raise BadRequestError(
                    f"there are {count} files, the limit is {limit} (setting --max-files); delete some",
                    code="too_many_files",
                )
            rows.run(
                "INSERT INTO files (id, owner, bytes, ready, expires_at, record) VALUES (?, ?, 0, 0, ?, '')",
                *(file_id, owner, int(self._clock()) + _UPLOAD_S),
            )
        try:
            return Upload(self, file_id, owner, self._contents.create(file_id))
        except BaseException:
            self.remove(file_id)
            raise

    def files(self, owner: str) -> list[FileRecord]:
        """Return an owner's files, the oldest first."""
        self._drop_expired()
        query = "SELECT record FROM files WHERE owner = ? AND ready = 1 ORDER BY seq"
        return [_decoded(record) for (record,) in self._database.find(query, owner)]

    def find(self, owner: str, file_id: str) -> FileRecord:
        """Return a file. Raises BadRequestError (404) for an unknown file and for a file of another owner alike."""
        is_there = "ready = 1 AND (expires_at IS NULL OR expires_at > ?)"
        query = f"SELECT record FROM files WHERE id = ? AND owner = ? AND {is_there}"
        found = self._database.find(query, file_id, owner, int(self._clock()))
        if not found:
            raise not_found("file", file_id)
        return _decoded(found[0][0])

    def open(self, owner: str, file_id: str) -> tuple[FileRecord, BinaryIO]:
        """Return a file's record and bytes. Raises BadRequestError (404)."""
        record = self.find(owner, file_id)
        try:
            file = self._contents.open(file_id)
        except FileNotFoundError:  # deleted meanwhile
            raise not_found("file", file_id) from None
        size = file.seek(0, os.SEEK_END)
        if size != record.bytes:
            file.close()
            logger.warning("%s is damaged: it has %d bytes of %d", file_id, size, record.bytes)
            raise not_found("file", file_id)
        file.seek(0)
        return record, file

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises BadRequestError (404)."""
        self.find(owner, file_id)
        with self._database.transaction() as rows:
            statement = "UPDATE files SET ready = 0, expires_at = ? WHERE id = ? AND ready = 1"
            if not rows.run(statement, int(self._clock()) + _REMOVAL_S, file_id):
                raise not_found("file", file_id)
        self.remove(file_id)

    def for_owner(self, owner: str) -> Callable[[str], StoredFile]:
        """Return a function that finds an owner's files by their ids, as media. It raises BadRequestError (404)."""
        return lambda file_id: StoredFile(self, self.find(owner, file_id))

    def close(self) -> None:
        """Begin no more work. Files stay."""
        self.threads.close()
        self._database.close()

    @property
    def bytes(self) -> int:
        """The bytes of files and unfinished uploads."""
        return sum(count for (count,) in self._database.find("SELECT bytes FROM files"))

    def reserve(self, upload: Upload, count: int) -> None:
        """Make room for `count` more bytes of an upload. Raises BadRequestError if there is none."""
        total = self._settings.max_file_store_bytes
        with self._database.transaction(alone=True, durable=False) as rows:
            held = dict(rows.find("SELECT owner, CAST(sum(bytes) AS BIGINT) FROM files GROUP BY owner"))
            taken, most, limit = share_of(total, held, upload.owner, shared=self.shared)
            if taken + count > most:
                raise BadRequestError(
                    f"the uploaded files would take {taken + count} bytes, the limit is {limit} (setting "
                    "--max-file-store-bytes); delete some",
                    code="file_store_full",
                )
            statement = "UPDATE files SET bytes = bytes + ?, expires_at = ? WHERE id = ? AND ready = 0"
            rows.run(statement, count, int(self._clock()) + _UPLOAD_S, upload.id)

    def commit(self, upload: Upload, *, filename: str, purpose: str, expire_after_s: float | None) -> FileRecord:
        """Make an upload a file. Called by `Upload.commit` only."""
        expire_after_s = self._settings.file_expire_after_s if expire_after_s is None else expire_after_s
        now = self._clock()
        record = FileRecord(
            id=upload.id,
            owner=upload.owner,
            bytes=upload.bytes,
            created_at=int(now),
            expires_at=None if expire_after_s is None else int(now + expire_after_s),
            filename=filename,
            purpose=purpose,
            modality=modality_of(upload.head),
        )
        with self._database.transaction() as rows:
            # The new row is the last one, in the order of the uploads' ends.
            if not rows.run("DELETE FROM files WHERE id = ? AND ready = 0", record.id):
                raise BadRequestError("the upload took too long, and was dropped", code="upload_dropped", status=408)
            rows.run(
                "INSERT INTO files (id, owner, bytes, ready, expires_at, record) VALUES (?, ?, ?, 1, ?, ?)",
                *(record.id, record.owner, record.bytes, record.expires_at, json.dumps(asdict(record))),
            )
        return record

    def remove(self, file_id: str) -> None:
        """Remove the bytes and the row of a file that is not ready. If the bytes cannot be removed now, they are later,
        as those of expired files."""
        try:
            self._contents.remove(file_id)
            with self._database.transaction() as rows:
                rows.run("DELETE FROM files WHERE id = ? AND ready = 0", file_id)
        except STORE_ERRORS as error:
            logger.warning("%s is removed later: %s", file_id, error)

    def check_size(self, size: int) -> None:
        """Raise BadRequestError (413) for a file of more bytes than one may have."""
        if size > self._settings.max_file_bytes:
            raise BadRequestError(
                f"the file is larger than {self._settings.max_file_bytes} bytes (setting --max-file-bytes)",
                param="file",
                code="file_too_large",
                status=413,
            )

    def _drop_expired(self) -> None:
        now = int(self._clock())
        expired = "SELECT id FROM files WHERE expires_at <= ?"
        if not self._database.find(expired, now):
            return
        with self._database.transaction(alone=True) as rows:
            ids: Iterable[str] = [file_id for (file_id,) in rows.find(expired, now)]
            claim = "UPDATE files SET ready = 0, expires_at = ? WHERE id = ?"
            rows.run_many(claim, [(now + _REMOVAL_S, file_id) for file_id in ids])
        for file_id in ids:
            self.remove(file_id)


class Upload(AbstractContextManager["Upload"]):
    """A file being written; a context manager that leaves nothing behind unless it was committed. head: its first
    bytes.

    Its methods may be called in different threads, even while one of them is still at work.
    """

    def __init__(self, store: FileStore, file_id: str, owner: str, file: BinaryIO) -> None:
        self.id = file_id
        self.owner = owner
        self.bytes = 0
        self.head = b""
        self._store = store
        self._contents = store._contents
        self._file = file
        self._lock = threading.Lock()
        self._open = True

    def write(self, data: bytes) -> None:
        """Append bytes. Raises BadRequestError at a limit."""
        with self._lock:
            if not self._open:
                raise ValueError("the upload is closed")
            self._store.check_size(self.bytes + len(data))
            self._store.reserve(self, len(data))
            self.bytes += len(data)
            self.head += data[: HEAD_BYTES - len(self.head)]
            self._file.write(data)

    def commit(self, *, filename: str, purpose: str, expire_after_s: float | None = None) -> FileRecord:
        """Make the upload a file. expire_after_s: seconds to keep it; None: as the settings say."""
        with self._lock:
            self._contents.settle(self._file)
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
                except (BadRequestError, *STORE_ERRORS) as error:  # the last bytes found no room
                    logger.debug("closing an upload: %s", error)
                finally:
                    self._store.remove(self.id)

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


def _decoded(text: str) -> FileRecord:
    raw = json.loads(text)
    return FileRecord(**{**raw, "modality": raw["modality"] and Modality(raw["modality"])})
