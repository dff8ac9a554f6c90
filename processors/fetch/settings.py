"""What fetching may reach and cost."""

from __future__ import annotations

from dataclasses import dataclass

from processors.inputs import Modality


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLimit:
    """bytes: the most. setting: its name, for errors."""

    bytes: int
    setting: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSettings:
    """What a client's URL may reach and cost.

    allow_private_media: let http(s) URLs reach loopback, private, link-local and other non-public addresses.
    allowed_local_media_path: the folder below which file: URLs may read; None refuses them all.
    max_bytes, max_video_bytes: the largest picture and video file. timeout_s: seconds for one URL in all: name lookup,
    connecting, redirects, body.
    max_redirects: redirects followed. allowed_media_domains: the only hosts http(s) URLs may name, redirects included
    (".example.com" stands for everything below example.com); None for any host.
    max_per_host: downloads from one host at a time. memory_mib: what was fetched and is not processed yet may take.
    """

    allow_private_media: bool = False
    allowed_local_media_path: str | None = None
    max_bytes: int = 64 * 2**20
    max_video_bytes: int = 256 * 2**20
    timeout_s: float = 15.0
    max_redirects: int = 5
    allowed_media_domains: tuple[str, ...] | None = None
    user_agent: str = "vlmserve"
    max_per_host: int = 16
    memory_mib: int = 1024

    def limit(self, modality: Modality) -> ByteLimit:
        """The largest file of a modality."""
        if modality is Modality.VIDEO:
            return ByteLimit(bytes=self.max_video_bytes, setting="--max-video-bytes")
        return ByteLimit(bytes=self.max_bytes, setting="--media-max-bytes")
