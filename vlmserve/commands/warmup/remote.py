"""Warmup of a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx2

from processors.inputs import Modality
from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.client.chat_client import CONNECT_TIMEOUT_S, error_in, json_or_none
from vlmserve.commands.client.chat_files import with_data_urls
from vlmserve.commands.warmup.run import Warmed, WarmupStopped
from vlmserve.ipc.messages import EncodedItem
from vlmserve_common.errors import BadRequestError, EngineError

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
        """Return the error of a bad request, or one that ends the run."""
        told = error_in(answer)
        message, code, param = told.get("message") or f"HTTP status {status}", told.get("code"), told.get("param")
        if status == 500:
            return EngineError(message)
        is_bad = status in (400, 413, 422) and code != "no_embedding_cache"
        no_upload = status == 404 and (param or "").startswith("messages")
        if is_bad or no_upload:
            return BadRequestError(message, param=param, code=code, status=status)
        return WarmupStopped(f"{self._url}: {message}")
