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
class PoolStats:
    """Totals since the start, in temporal patches, and the present `queued` and `under_way`.

    `encoded`, `patches_encoded`: the latter in vision patches. `coalesced`: submitted while equal content was queued or
    under way. `failed`: given up after a retry. `saved`: newly on the disk. `save_failures`: writes that failed.
    `host`, `disk`: None without that tier.
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
