"""Figures of the encoder pool and its tiers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStats:
    """Figures of one tier: totals since the start, and the present bytes, held_bytes (in use or about to be) and
    entries."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes: int = 0
    held_bytes: int = 0
    entries: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStats:
    """Figures of the links to encoders on other servers or, on an encoder, to its consumers: totals since the start.

    `links`: usable at present. `open`: temporal patches asked for whose rows are not delivered yet, at present.
    `asked`: temporal patches asked for. `pixels`: those whose pixels were sent, since no cache had them. `rows`: those
    whose rows came. `home`: those encoded at home after all. `late`: those that took too long.
    """

    links: int = 0
    open: int = 0
    asked: int = 0
    pixels: int = 0
    rows: int = 0
    home: int = 0
    late: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """Totals since the start, in temporal patches, and the present `queued` and `under_way`.

    `encoded`, `patches_encoded`: the latter in vision patches. `coalesced`: submitted while equal content was queued or
    under way. `failed`: given up after a retry. `saved`: newly on the disk. `save_failures`: writes that failed.
    `host`, `disk`: None without that tier. `link`: None without links to other servers.
    """

    encoded: int = 0
    patches_encoded: int = 0
    coalesced: int = 0
    retried: int = 0
    failed: int = 0
    saved: int = 0
    save_failures: int = 0
    queued: int = 0
    under_way: int = 0
    device: TierStats = TierStats()
    host: TierStats | None = None
    disk: TierStats | None = None
    link: LinkStats | None = None
