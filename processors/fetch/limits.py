"""Settings that limit what fetching may reach and cost, and the memory that fetched files may take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

from processors.inputs import Modality

_MIB = 2**20
FREE_BYTES = _MIB
"""Every medium may take this much without a claim, so that a slow host delays nobody else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLimit:
    """A limit. `bytes`: the most. `setting`: its name, for errors."""

    bytes: int
    setting: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSettings:
    """Limits of what a client's URL may reach and cost.

    `allow_private_media`: let http(s) URLs reach loopback, private, link-local and other non-public addresses.
    `allowed_local_media_path`: the folder below which file: URLs may read; None refuses them all. `max_bytes`,
    `max_video_bytes`, `max_audio_bytes`: the largest picture, video and sound file. `timeout_s`: seconds for one URL,
    including name lookup, connecting, redirects and body. `max_redirects`: redirects followed.
    `allowed_media_domains`: the only hosts that http(s) URLs and redirects may name; None for any host. ".example.com"
    stands for everything below example.com.
    `max_per_host`: downloads from one host at a time. `memory_mib`: for fetched files that are not processed yet.
    """

    allow_private_media: bool = False
    allowed_local_media_path: str | None = None
    max_bytes: int = 64 * 2**20
    max_video_bytes: int = 256 * 2**20
    max_audio_bytes: int = 128 * 2**20
    timeout_s: float = 15.0
    max_redirects: int = 5
    allowed_media_domains: tuple[str, ...] | None = None
    user_agent: str = "vlmserve"
    max_per_host: int = 16
    memory_mib: int = 1024

    def limit(self, modality: Modality) -> ByteLimit:
        if modality is Modality.VIDEO:
            return ByteLimit(bytes=self.max_video_bytes, setting="--max-video-bytes")
        if modality is Modality.AUDIO:
            return ByteLimit(bytes=self.max_audio_bytes, setting="--max-audio-bytes")
        return ByteLimit(bytes=self.max_bytes, setting="--media-max-bytes")


class MediaMemory:
    """Memory for fetched files until they are processed. `mib`: for all media larger than `FREE_BYTES` together."""

    def __init__(self, mib: int) -> None:
        self.mib = self.free = mib
        self.freed = asyncio.Event()
        self.turn = asyncio.Lock()


class Claim:
    """One medium's part of the memory, released at the end of a `with` block.

    `whole`: bytes to take at once for a medium that comes in pieces.
    """

    def __init__(self, memory: MediaMemory) -> None:
        self.whole = 0
        self._memory = memory
        self._taken = 0
        self._lock = asyncio.Lock()

    @property
    def taken(self) -> bool:
        return self._taken > 0

    def fits(self, size: int) -> bool:
        """Return True if `take` would not wait.

        A caller that would wait must give up its turn first: media that hold memory may need the turn.
        """
        if self.taken or size <= FREE_BYTES:
            return True
        return not self._memory.turn.locked() and self._memory.free >= self._wanted(size)

    async def take(self, size: int) -> None:
        """Wait for memory for so many bytes, unless they are few. A claim takes memory only once.

        If it could take more later, two claims could wait for each other.
        """
        if size <= FREE_BYTES:
            return
        memory, wanted = self._memory, self._wanted(size)
        async with self._lock:
            if self._taken:
                return
            async with memory.turn:  # no other claim takes the free memory meanwhile
                while memory.free < wanted:
                    memory.freed.clear()
                    await memory.freed.wait()
                memory.free -= wanted
                self._taken = wanted

    def _wanted(self, size: int) -> int:
        return min(-(-(max(self.whole, size)) // _MIB), self._memory.mib)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._memory.free += self._taken
        self._memory.freed.set()
        self._taken = 0


def within(host: str, domain: str) -> bool:
    """Return True if `host` is `domain`, or lies below a domain that is written with a leading dot."""
    host, domain = host.lower().rstrip("."), domain.lower().rstrip(".")
    return host != "" and (host.endswith(domain) if domain.startswith(".") else host == domain)
