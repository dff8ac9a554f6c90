"""Asks a server of embeddings how near pictures are to a question.

Requests have the form of a chat, one for each picture, which vlmserve's and vLLM's `/v1/embeddings` take.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import numpy as np

from processors.fetch.sources import call_off
from vlmserve_common.errors import VlmserveError, first_line

logger = logging.getLogger(__name__)

_AT_A_TIME = 8
_PAUSE_S = 10.0
_MOST_NUMBERS = 65536  # of a vector
_INSTRUCTION = "Retrieve images or text relevant to the user's query."


class EmbedderError(VlmserveError):
    """There are no embeddings. The text says why, in words for the client whose question it was."""


class Embedder:
    """The client of a server of embeddings. url: http://HOST:PORT/v1. model: None for the first one that it lists.
    timeout_s: for all pictures of a question together.

    A server that does not answer in time, or not at all, is left alone for ten seconds, so that other requests do not
    wait for it.
    """

    def __init__(self, url: str, *, model: str | None, api_key: str | None, timeout_s: float) -> None:
        self._url, self._model, self._timeout_s = url, model, timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._tls = httpx2.create_ssl_context(trust_env=False)  # making it takes longer than making a client
        self._asked_from = 0.0

    async def nearness(self, question: str, pictures: Sequence[bytes]) -> list[float]:
        """Return how near each picture, a JPEG file, is to the question: the cosine of the angle between their vectors.
        Raises EmbedderError."""
        if not pictures:
            return []
        self.check_asked()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx2.AsyncClient(headers=self._headers, timeout=None, trust_env=False, verify=self._tls) as http,
            ):
                return await self._compare(http, question, pictures)
        except TimeoutError:
            limit = f"{self._timeout_s:g} s (setting --embedder-timeout-s)"
            raise self._lost(f"the server of embeddings did not answer within {limit}", "it is slow") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = first_line(error) if str(error) else type(error).__name__
            raise self._lost("the server of embeddings cannot be reached", why) from None

    def check_asked(self) -> None:
        """Raise EmbedderError while the server is left alone."""
        if time.monotonic() < self._asked_from:
            raise EmbedderError("the server of embeddings did not answer a moment ago")

    def _lost(self, told: str, why: str) -> EmbedderError:
        """Note that the server is not there. told: to clients. why: for the log."""
        self._asked_from = time.monotonic() + _PAUSE_S
        logger.warning("--embedder-url %s is not asked for %g s: %s (%s)", self._url, _PAUSE_S, told, why)
        return EmbedderError(told)

    async def _compare(self, http: httpx2.AsyncClient, question: str, pictures: Sequence[bytes]) -> list[float]:
        model = self._model or str(_first(await self._answer(http.get(f"{self._url}/models")), "data", 0, "id"))
        turns = asyncio.Semaphore(_AT_A_TIME)

        async def vector(messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
            body = {"model": model, "messages": messages, "encoding_format": "base64"}
            async with turns:
                answer = await self._answer(http.post(f"{self._url}/embeddings", json=body))
            return _direction(_first(answer, "data", 0, "embedding"))

        asked = [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": question}]
        tasks = [asyncio.create_task(vector(asked)), *(asyncio.create_task(vector(_shown(one))) for one in pictures)]
        try:
            wanted, *found = await asyncio.gather(*tasks)
        finally:
            await call_off(tasks)
        if any(one.shape != wanted.shape for one in found):
            raise EmbedderError("the server of embeddings gives vectors of different lengths")
        return [float(one @ wanted) for one in found]

    async def _answer(self, call: Any) -> Any:
        response = await call
        if response.status_code != 200:
            logger.warning("--embedder-url %s answers %d: %s", self._url, response.status_code, response.text[:500])
            raise EmbedderError(f"the server of embeddings answers with HTTP status {response.status_code}")
        try:
            return response.json()
        except ValueError:
            raise _strange() from None


def _shown(picture: bytes) -> list[dict[str, Any]]:
    url = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def _first(answer: Any, *path: str | int) -> Any:
    try:
        for step in path:
            answer = answer[step]
    except (LookupError, TypeError):
        raise _strange() from None
    return answer


def _direction(given: Any) -> np.ndarray:
    """Return a vector of length 1, float64, of base64 of little-endian float32, or a list of numbers."""
    try:
        row = np.frombuffer(base64.b64decode(given), "<f4") if isinstance(given, str) else np.array(given, float)
        length = float(np.linalg.norm(row.astype(float)))
    except (ValueError, TypeError, OverflowError):
        raise _strange() from None
    if row.ndim != 1 or not 0 < len(row) <= _MOST_NUMBERS or not math.isfinite(length):
        raise _strange()
    return row.astype(float) / max(length, 1e-12)


def _strange() -> EmbedderError:
    return EmbedderError("the server of embeddings does not answer as OpenAI's API does")
