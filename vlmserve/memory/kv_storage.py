"""The disk behind the host's tier: KV of runs of pages in safetensors files, which threads write and read.

It is a cache: a damaged file or a failing disk costs a prefix hit and never a request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vision.cache.durable_file import is_temporary, make_folder, remove_abandoned, write_file
from vlmserve_common.errors import EngineError

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_DIGEST = 32
_HEADER_BYTES = 512


class KVStorage:
    """Files FOLDER/KEY.safetensors. KEY is the digest of a run's first page (see `page_digests`). `pages` uint8 [n, 32]
    has the digests of all its pages. `rows` uint8 [tokens, bytes_per_token] is as in a `KVTransfer`.

    The least recently used files go when there are more than limit_bytes. folder: of one model, one dtype of KV and one
    page size. clock: seconds since 1970. EngineError if the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        bytes_per_token: int,
        page_size: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._width = bytes_per_token
        self._page_size = page_size
        self._clock = clock
        self._lock = threading.Lock()
        self._sizes: dict[bytes, int] = {}  # the least recently used first
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-reader")
        try:
            make_folder(folder, mode=0o700)  # KV tells what its prompt was
            self._look()
        except OSError as error:
            raise EngineError(
                f"the folder {folder} cannot be used: {error.strerror} (setting --hicache-storage-dir)"
            ) from None

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._sizes

    @property
    def limit_bytes(self) -> int:
        """The most bytes that all files together may take."""
        return self._limit

    def file_bytes(self, num_pages: int) -> int:
        """Return the most bytes that a file of so many pages takes."""
        return num_pages * (self._page_size * self._width + _DIGEST) + _HEADER_BYTES

    @property
    def size(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(self._sizes.values())

    def save(self, pages: list[bytes], rows: torch.Tensor) -> Future[None]:
        """Begin to write a run, whose rows must not change any more. Do nothing if a file with the same first page
        exists."""
        return self._writer.submit(self._save, pages, rows)

    def load(self, pages: Iterable[bytes]) -> Future[torch.Tensor]:
        """Begin to read the KV of these pages, from the first one on, as far as it is there: rows uint8 [tokens,
        bytes_per_token]."""
        return self._reader.submit(self._load, pages)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait, for so many seconds at most, until everything is written. Return whether it is."""
        try:
            self._writer.submit(lambda: None).result(None if timeout_s is None else max(0.0, timeout_s))
        except TimeoutError:
            return False
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Flush, and end the threads. Runs that no thread has begun to write in time are lost."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        written = self.flush(timeout_s)
        self._writer.shutdown(wait=written, cancel_futures=True)
        return written

    def _look(self) -> None:
        found = []
        for item in os.scandir(self._folder):
            if is_temporary(item.name):
                remove_abandoned(Path(item.path), now_s=self._clock())
            elif item.name.endswith(_SUFFIX):
                with contextlib.suppress(ValueError, FileNotFoundError):
                    key, status = bytes.fromhex(item.name.removesuffix(_SUFFIX)), item.stat()
                    found.append((status.st_mtime, key, status.st_size))
        self._sizes = {key: size for _, key, size in sorted(found)}

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"

    def _save(self, pages: list[bytes], rows: torch.Tensor) -> None:
        key = pages[0]
        tensors = {"pages": torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8), "rows": rows}
        tensors["pages"] = tensors["pages"].view(-1, _DIGEST)
        try:
            if key in self:
                return
            data = save(tensors, metadata={"blake3": _checksum(tensors)})
            if len(data) > self._limit:
                return
            self._make_room(len(data))
            write_file(self._path(key), [data], time_s=self._clock())
            with self._lock:
                self._sizes[key] = len(data)
        except OSError as error:
            log.warning("KV could not be written to %s, going on without: %s", self._folder, error)

    def _make_room(self, need: int) -> None:
        while self.size + need > self._limit:
            with self._lock:
                oldest = next(iter(self._sizes))
            self._remove(oldest)

    def _remove(self, key: bytes) -> None:
        with self._lock:
            self._sizes.pop(key, None)
        self._path(key).unlink(missing_ok=True)

    def _load(self, pages: Iterable[bytes]) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        wanted = iter(pages)
        first = next(wanted, None)
        while first is not None and first in self:
            run = self._read(first)
            if run is None:
                break
            own, rows = run
            same = 0
            follows: bytes | None = first
            for page in own:
                if page != follows:
                    break
                same += 1
                follows = next(wanted, None)
            parts.append(rows[: same * self._page_size])
            first = follows
        return torch.cat(parts) if parts else torch.empty((0, self._width), dtype=torch.uint8)

    def _read(self, key: bytes) -> tuple[list[bytes], torch.Tensor] | None:
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in ("pages", "rows")}
                said = (file.metadata() or {}).get("blake3")
            digests = bytes(tensors["pages"].flatten().numpy())
            pages = [digests[at : at + _DIGEST] for at in range(0, len(digests), _DIGEST)]
            whole = tensors["rows"].shape == (len(pages) * self._page_size, self._width)
            if said != _checksum(tensors) or pages[:1] != [key] or not whole:
                raise SafetensorError("its content is not what was written")
            os.utime(path, (self._clock(), self._clock()))
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            log.warning("%s is damaged or gone, and removed: %s", path, error)
            self._remove(key)
            return None
        with self._lock:
            self._sizes[key] = self._sizes.pop(key, path.stat().st_size)
        return pages, tensors["rows"]


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = blake3()
    for name in ("pages", "rows"):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).numpy().data)
    return digest.hexdigest()
