"""Plain figures of the vision floor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStats:
    """Of one tier. Totals since the start, but for bytes, held_bytes (in use or about to be) and entries: these are
    what is there now."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes: int = 0
    held_bytes: int = 0
    entries: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """Totals since the start, in temporal patches, but for `queued` and `under_way`, which are there now.

    encoded, patches_encoded: and in vision patches. coalesced: came while equal content was queued or under way.
    failed: given up after a retry. saved: came to be on the disk. save_failures: writes that failed. host,
    disk: None where there is no tier.
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
