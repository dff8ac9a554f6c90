"""`vlmserve cache ls` and `stats`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vision.cache.entry_file import DamagedEntryError, EmbedsFormat, read_format
from vision.cache.folder import EmbeddingFolder, StoredEntry
from vlmserve.commands.cache.quantities import show_size


def list_entries(folder: EmbeddingFolder, limit: int | None) -> list[dict[str, Any]]:
    """Entries, the last used first, at most `limit`. used: seconds since 1970. rows, width, dtype: None if damaged."""
    entries = sorted(folder.entries(now_s=time.time()), key=lambda entry: (-entry.used, entry.path))[:limit]
    models = {name: folder.about(name).get("model", "?") for name in {entry.fingerprint for entry in entries}}
    listed = []
    for entry in entries:
        form = _format(entry)
        listed.append(
            {
                "key": entry.key,
                "rows": form and form.rows,
                "width": form and form.width,
                "dtype": form and form.dtype,
                "bytes": entry.bytes,
                "used": entry.used,
                "pinned": entry.pinned,
                "fingerprint": entry.fingerprint,
                "model": models[entry.fingerprint],
            }
        )
    return listed


def print_entries(listed: Sequence[dict[str, Any]]) -> None:
    """As a table."""
    if not listed:
        print("no entries")
        return
    print(f"{'key':18}{'rows':>14}  {'dtype':7}{'size':>10}  {'last used':21}{'pinned':8}model")
    for item in listed:
        rows = f"{item['rows']} x {item['width']}" if item["rows"] else "damaged"
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item["used"]))
        pinned = "yes" if item["pinned"] else "-"
        size = show_size(item["bytes"])
        print(
            f"{item['key'][:16]:18}{rows:>14}  {item['dtype'] or '-':7}{size:>10}  {used:21}{pinned:8}{item['model']}"
        )


def summarise(folder: EmbeddingFolder) -> dict[str, Any]:
    """Entries and bytes of each fingerprint, with what its about.json says, and of all together."""
    entries = list(folder.entries(now_s=time.time()))
    towers = [
        {
            "fingerprint": fingerprint,
            "about": {name: text for name, text in folder.about(fingerprint).items() if name != "fingerprint"},
            **_totals([entry for entry in entries if entry.fingerprint == fingerprint]),
        }
        for fingerprint in folder.fingerprints()
    ]
    return {"folder": str(folder.root.parent), "fingerprints": towers, **_totals(entries)}


def print_summary(summary: dict[str, Any]) -> None:
    """As a table."""
    print(f"{'fingerprint':18}{'entries':>9}{'size':>12}{'pinned':>8}  model")
    for tower in [*summary["fingerprints"], {**summary, "fingerprint": "total"}]:
        about = tower.get("about", {})
        details = ", ".join(f"{name} {about[name]}" for name in sorted(about) if name != "model")
        model = about.get("model", "?") + (f" ({details})" if details else "") if "about" in tower else ""
        line = f"{tower['fingerprint'][:16]:18}{tower['entries']:9}{show_size(tower['bytes']):>12}{tower['pinned']:8}"
        print(f"{line}  {model}".rstrip())


def _totals(entries: Sequence[StoredEntry]) -> dict[str, int]:
    return {
        "entries": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
        "pinned": sum(entry.pinned for entry in entries),
    }


def _format(entry: StoredEntry) -> EmbedsFormat | None:
    try:
        with entry.path.open("rb", buffering=0) as file:
            return read_format(file)
    except (DamagedEntryError, OSError):
        return None
