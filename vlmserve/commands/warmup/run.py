"""A warmup run: inputs are encoded, a few at a time, by this process or a running server.

The journal, the list of errors and the tally have the results.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import httpx2

from processors.inputs import Modality
from vlmserve.commands.batch.item import ChatRequest, Failed, Found, Item, RequestItem, digest_of
from vlmserve.commands.batch.progress import RunTally, phrases
from vlmserve.commands.client.chat_client import CONNECT_TIMEOUT_S, error_in, json_or_none
from vlmserve.commands.client.media import told_modality, with_data_urls
from vlmserve.ipc.messages import EncodedItem
from vlmserve_common.errors import BadRequestError, EngineError, VlmserveError

if TYPE_CHECKING:
    from vlmserve.commands.warmup.local import LocalTarget

logger = logging.getLogger(__name__)


class WarmupStopped(VlmserveError):
    """Nothing more can be encoded, so the run ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmed:
    """An encoded request. keys: of its entries; empty if a server does not tell them."""

    items: tuple[EncodedItem, ...]
    keys: tuple[bytes, ...] = ()


@dataclass(kw_only=True)
class WarmupTally(RunTally):
    """The counts of a warmup. done: inputs on disk now, or cached by a server without a disk.

    encoded, found: temporal patches that were computed, and that were cached. patches_encoded: the computed ones in
    vision patches. ignored: files in folders that are neither pictures nor videos.
    """

    encoded: int = 0
    found: int = 0
    patches_encoded: int = 0
    ignored: int = 0
    unit: ClassVar[str] = "patches"

    @property
    def hits(self) -> int:
        return self.found

    @property
    def work(self) -> int:
        return self.patches_encoded

    def add(self, items: Sequence[EncodedItem]) -> None:
        """Count an encoded input."""
        self.done += 1
        for item in items:
            self.encoded += item.encoded
            self.found += item.found
            self.patches_encoded += item.patches_encoded

    def describe(self, seconds: float) -> str:
        """Return the summary as a line for people."""
        done = f"{self.done} of {self.total} done in {seconds:.1f} s"
        text = ", ".join([done, *phrases((self.skipped, "finished before"), (self.failed, "failed"))])
        text += (
            f"; temporal patches: {self.encoded} encoded ({self.patches_encoded} vision patches), {self.found} found"
        )
        return text + (f"; files that are neither pictures nor videos: {self.ignored}" if self.ignored else "")


class WarmupJournal:
    """The finished inputs of all runs, one line of JSON each. A line that was cut off is skipped.

    settings: text that differs when the same input would become other entries. Raises OSError.
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
        """Return the keys of an input's entries; None if it is not finished."""
        return self._finished.get(identity)

    def add(self, identity: str, keys: Sequence[bytes], *, source: str) -> None:
        """Note a finished input; it is on disk on return. source: its name for people."""
        line = {
            "source": source,
            "identity": identity,
            "settings": self._settings,
            "keys": [key.hex() for key in keys],
        }
        self._append(json.dumps(line).encode() + b"\n")
        self._finished[identity] = tuple(keys)

    def close(self) -> None:
        """Close the file."""
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


@dataclass(frozen=True, kw_only=True)
class WarmupRun:
    """Encodes inputs. journal: may be None. errors: file for one line of JSON per failed input; None only logs them.

    concurrency: inputs at a time, which bounds memory.
    """

    target: LocalTarget | RemoteTarget
    tally: WarmupTally
    journal: WarmupJournal | None
    errors: TextIO | None
    concurrency: int

    async def run(self, inputs: Iterator[Found]) -> None:
        """Encode all inputs. Raises WarmupStopped. Cancelling ends current requests."""
        pulling = asyncio.Lock()
        tasks = [asyncio.create_task(self._work(inputs, pulling)) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, inputs: Iterator[Found], pulling: asyncio.Lock) -> None:
        while True:
            async with pulling:
                item = await asyncio.to_thread(next, inputs, None)
            if item is None:
                return
            try:
                if isinstance(item, Failed):
                    self._fail(item.id, item.message, item.code)
                else:
                    await self._warm(item)
            except WarmupStopped:
                raise
            except BadRequestError as error:
                self._fail(item.id, error.message, error.code, error.param if isinstance(item, RequestItem) else None)
            except (EngineError, OSError) as error:
                self._fail(item.id, str(error), "engine_error")
            except Exception as error:
                logger.exception("%s failed unexpectedly", item.id)
                self._fail(item.id, f"{type(error).__name__}: {error}", "internal_error")

    async def _warm(self, item: Item) -> None:
        request: ChatRequest | None = None
        if not isinstance(item, RequestItem) and item.path is not None and item.signature is not None:
            identity = f"file {item.path.absolute()} {item.signature}"
        else:
            request = await asyncio.to_thread(_read, item)
            identity = f"content {digest_of([request.messages, request.options]).hex()}"
        if self.journal is not None:
            keys = self.journal.finished(identity)
            if keys is not None and self.target.holds(keys):
                self.tally.skipped += 1
                return
        if request is None:
            request = await asyncio.to_thread(_read, item)
        warmed = await self.target.encode(request)
        self.tally.add(warmed.items)
        if self.journal is not None and all(encoded.saved for encoded in warmed.items):
            self.journal.add(identity, warmed.keys, source=item.id)

    def _fail(self, source: str, message: str, code: str | None, param: str | None = None) -> None:
        self.tally.failed += 1
        if self.errors is None:
            logger.error("%s: %s", source, message)
            return
        line = {"source": source, "param": param, "message": message, "code": code}
        print(json.dumps(line, ensure_ascii=False), file=self.errors, flush=True)


def _read(item: Item) -> ChatRequest:
    if isinstance(item, RequestItem):
        return item.read()
    data = item.read()
    modality = told_modality(data)
    part = {"type": modality.value, modality.value: data}
    return ChatRequest(messages=[{"role": "user", "content": [part]}], options=item.options)


# Pauses between tries while a server is busy (429) or not ready (503).
_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_BUSY = (429, 503)
_COUNTED = ("temporal_patches", "encoded", "patches_encoded", "saved")


class RemoteTarget:
    """Lets a server encode. url: http://host:port, with or without /v1. `settings`: see `LocalTarget`."""

    def __init__(self, url: str, *, api_key: str | None, pin: bool) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/warmup"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        timeout, limits = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S), httpx2.Limits(max_connections=None)
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits)
        self._pin = pin
        self._saves = True
        self.settings = f"{'pinned' if pin else 'unpinned'} {self._url}"

    async def encode(self, request: ChatRequest) -> Warmed:
        """Send a request until it is encoded. BadRequestError and EngineError concern this request alone."""
        content = await asyncio.to_thread(self._content, request)
        for wait_s in (*_WAITS_S, None):
            status, answer = await self._post(content)
            if status == 200:
                return self._warmed(answer)
            if status not in _BUSY or wait_s is None:
                break
            await asyncio.sleep(wait_s)
        raise self._error(status, answer)

    def holds(self, keys: Sequence[bytes]) -> bool:
        """Return True: a server does not tell which entries it still has."""
        return True

    def notes(self) -> list[str]:
        """Return sentences for the user at the end of the run."""
        if self._saves:
            return []
        return [
            "the server keeps no embeddings on disk (--embedding-cache-dir): they are lost when it ends, or earlier"
        ]

    async def close(self) -> None:
        """End all requests."""
        await self._client.aclose()

    def _content(self, request: ChatRequest) -> bytes:
        body = {**request.options, "messages": with_data_urls(request.messages)}
        return json.dumps(body | ({"pin": True} if self._pin else {})).encode()

    async def _post(self, content: bytes) -> tuple[int, Any]:
        try:
            response = await self._client.post(self._url, content=content)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise WarmupStopped(f"no answer from {self._url}: {str(error) or type(error).__name__}") from None
        return response.status_code, json_or_none(response.content)

    def _warmed(self, answer: Any) -> Warmed:
        try:
            items = tuple(
                EncodedItem(modality=Modality(item["type"]), **{name: item[name] for name in _COUNTED})
                for item in answer["items"]
            )
        except (TypeError, KeyError, ValueError):
            raise WarmupStopped(f"{self._url} does not answer as vlmserve does") from None
        if any(item.saved is False for item in items):
            raise WarmupStopped("the server could not write to its embedding cache; its log says why")
        self._saves &= all(item.saved for item in items)
        return Warmed(items=items)

    def _error(self, status: int, answer: Any) -> Exception:
        told = error_in(answer)
        message, code, param = told.get("message") or f"HTTP status {status}", told.get("code"), told.get("param")
        if status == 500:
            return EngineError(message)
        is_bad = status in (400, 413, 422) and code != "no_embedding_cache"
        no_upload = status == 404 and (param or "").startswith("messages")
        if is_bad or no_upload:
            return BadRequestError(message, param=param, code=code, status=status)
        return WarmupStopped(f"{self._url}: {message}")
