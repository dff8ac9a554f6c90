"""`vlmserve cache verify` and `prune`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vision.cache.entry_file import DamagedEntryError, read_entry
from vision.cache.folder import EmbeddingFolder, StoredEntry, least_recently_used, remove_damaged


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRules:
    """Which entries go. fingerprints: those of others stay. older_than_s: what was not used for longer goes. max_bytes:
    then, what was not used for longest goes until no more is left. Neither: all go. unpin: pinned ones, too."""

    fingerprints: Collection[str]
    older_than_s: float | None
    max_bytes: int | None
    unpin: bool


def verify(folder: EmbeddingFolder, *, remove: bool) -> tuple[int, list[tuple[StoredEntry, str, bool]]]:
    """Read every entry: how many there are, and the bad ones: (entry, why, whether it was removed). remove: those that
    are damaged."""
    count, bad = 0, []
    for entry in folder.entries(now_s=time.time()):
        try:
            with entry.path.open("rb", buffering=0) as file:
                try:
                    read_entry(file, bytes.fromhex(entry.key))
                except DamagedEntryError as error:
                    bad.append((entry, str(error), remove and remove_damaged(entry.path, file)))
        except FileNotFoundError:
            continue  # evicted meanwhile
        except OSError as error:
            bad.append((entry, f"it cannot be read: {error.strerror}", False))
        count += 1
    return count, bad


def prune(folder: EmbeddingFolder, rules: PruneRules, *, dry_run: bool) -> tuple[list[StoredEntry], list[StoredEntry]]:
    """Remove entries by the rules: (those that went, those that stay). dry_run: only say which."""
    now = time.time()
    if dry_run or not folder.root.is_dir():
        return _divided(list(folder.entries(now_s=now)), rules, now)
    with folder.locked(wait=True):
        folder.sweep(now_s=now)
        going, staying = _divided(list(folder.entries(now_s=now)), rules, now)
        gone = folder.evict(going)
        for fingerprint in rules.fingerprints:
            if all(entry.fingerprint != fingerprint for entry in staying):
                folder.remove_empty(fingerprint, unpin=rules.unpin)
    return gone, staying


def _divided(
    entries: Sequence[StoredEntry], rules: PruneRules, now: float
) -> tuple[list[StoredEntry], list[StoredEntry]]:
    looked_at = [entry for entry in entries if entry.fingerprint in rules.fingerprints]
    loose = [entry for entry in looked_at if rules.unpin or not entry.pinned]
    if rules.older_than_s is None and rules.max_bytes is None:
        going = loose
    else:
        going = [e for e in loose if rules.older_than_s is not None and now - e.used > rules.older_than_s]
        if rules.max_bytes is not None:
            left = sum(entry.bytes for entry in looked_at) - sum(entry.bytes for entry in going)
            old = {entry.path for entry in going}
            rest = [entry for entry in loose if entry.path not in old]
            going += least_recently_used(rest, left - rules.max_bytes)
    paths = {entry.path for entry in going}
    return going, [entry for entry in entries if entry.path not in paths]
