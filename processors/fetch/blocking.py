"""Fetching for threads that have no event loop."""

from __future__ import annotations

from concurrent.futures import CancelledError

from processors.fetch.fetching import MediaFetcher
from processors.fetch.settings import FetchSettings
from processors.inputs import Modality
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.loop_thread import LoopThread


class BlockingFetcher:
    """See `MediaFetcher`. Thread-safe. Close it when done."""

    def __init__(self, settings: FetchSettings) -> None:
        self.settings = settings
        self._fetcher = MediaFetcher(settings)
        self._loop = LoopThread("fetch")
        self._closed = False

    def fetch(self, url: str, *, modality: Modality = Modality.IMAGE) -> bytes:
        """See `MediaFetcher.fetch`."""
        try:
            return self._loop.run(self._fetcher.fetch(url, modality=modality))
        except (CancelledError, RuntimeError):
            if not self._closed:
                raise
            raise BadRequestError(f"{url[:100]!r} was not fetched: no more is", code="invalid_media_url") from None

    def close(self) -> None:
        """Break off downloads under way and refuse new ones."""
        self._closed = True
        self._loop.close()
        self._fetcher.close()
