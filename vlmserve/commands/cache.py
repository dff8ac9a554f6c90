"""`vlmserve cache`: look at the embedding cache on disk, and clear it by hand."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from vision.cache.entry_file import DamagedEntryError, EmbedsFormat, read_entry, read_format
from vision.cache.folder import EmbeddingFolder, StoredEntry, least_recently_used, remove_damaged
from vlmserve.config.flags import CommandParser, positive
from vlmserve.config.settings import ENV_PREFIX

_BINARY = ("KiB", "MiB", "GiB", "TiB")
_SIZES = {
    "B": 1,
    **{unit: 1024**power for power, unit in enumerate(_BINARY, 1)},
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)},
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_VARIABLE = f"{ENV_PREFIX}EMBEDDING_CACHE_DIR"
_EPILOG = """\
examples:
  vlmserve cache ls DIR --limit 20
  vlmserve cache stats DIR
  vlmserve cache verify DIR --remove
  vlmserve cache prune DIR --max-size 10GiB
  vlmserve cache prune DIR --older-than 7d --dry-run
"""


def size(text: str) -> int:
    """Return the bytes of "10GiB", "1.5 MB" or "4096". Raises ArgumentTypeError."""
    return int(_value(text, _SIZES, "a size such as 500MiB or 10GiB", without_unit="B"))


def age(text: str) -> float:
    """Return the seconds of "90s", "30m", "12h", "7d" or "2w". Raises ArgumentTypeError."""
    return _value(text, _AGES, "an age such as 30m, 12h, 7d or 2w")


def show_size(count: int) -> str:
    """Return a number of bytes for people, such as "1.5 KiB"."""
    value, unit = float(count), "B"
    for larger in _BINARY:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _value(text: str, units: dict[str, int], expected: str, *, without_unit: str = "") -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    unit = (match.group(2) or without_unit) if match else ""
    if not match or unit not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected} (units: {', '.join(units)})")
    return float(match.group(1)) * units[unit]


def _list_entries(folder: EmbeddingFolder, limit: int | None) -> list[dict[str, Any]]:
    """Return entries, the last used first. used: seconds since 1970. rows, width, dtype: None if damaged."""
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


def _print_entries(listed: Sequence[dict[str, Any]]) -> None:
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


def _summarise(folder: EmbeddingFolder) -> dict[str, Any]:
    """Return entries and bytes of each fingerprint, with its about.json, and the totals."""
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


def _print_summary(summary: dict[str, Any]) -> None:
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


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0, or 1 if `verify` finds a bad entry. OSError if the folder cannot be used."""
    parser = _parser()
    args = parser.parse_args(argv)
    folder = EmbeddingFolder(_directory(parser, args.dir))
    if args.command == "ls":
        (_print_json if args.json else _print_entries)(_list_entries(folder, args.limit))
    elif args.command == "stats":
        (_print_json if args.json else _print_summary)(_summarise(folder))
    elif args.command == "verify":
        return _verify(folder, args)
    else:
        _prune(folder, _chosen(parser, folder, args), args)
    return 0


def _parser() -> argparse.ArgumentParser:
    common = CommandParser(add_help=False)
    common.add_argument("dir", metavar="DIR", nargs="?", help=f"the cache's folder [env: {_VARIABLE}]")
    common.add_argument("--json", action="store_true", help="print JSON")
    parser = CommandParser(
        prog="vlmserve cache",
        usage="%(prog)s COMMAND [DIR] [options]",
        description="Look at the embedding cache on disk and clear it. Servers may use it at the same time.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog=parser.prog)

    def add(name: str, about: str) -> argparse.ArgumentParser:
        usage = "%(prog)s [DIR] [options]"
        return commands.add_parser(
            name, parents=[common], help=about, description=f"{about.capitalize()}.", usage=usage
        )

    listing = add("ls", "list entries, the last used first")
    listing.add_argument("--limit", type=positive, metavar="N", help="list no more than these")
    add("stats", "count entries and bytes, model by model")
    verifying = add("verify", "read every entry, list the bad ones and exit with 1 if there are any")
    verifying.add_argument("--remove", action="store_true", help="remove damaged entries")
    pruning = add("prune", "remove entries that are old, or too many, or of models no longer served")
    text = "the least recently used, until no more than e.g. 10GiB are left"
    pruning.add_argument("--max-size", type=size, metavar="SIZE", help=text)
    pruning.add_argument(
        "--older-than", type=age, metavar="AGE", help="entries not used for longer than e.g. 7d or 12h"
    )
    which = pruning.add_mutually_exclusive_group()
    text = "entries of this fingerprint (or its beginning), and with the flags above only these; may be repeated"
    which.add_argument("--fingerprint", action="append", metavar="F", help=text)
    which.add_argument("--all-but", action="append", metavar="F", help="the same for all other fingerprints")
    pruning.add_argument("--unpin", action="store_true", help="pinned entries, too")
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def _directory(parser: argparse.ArgumentParser, given: str | None) -> Path:
    text = given or os.environ.get(_VARIABLE)
    if not text:
        parser.error(f"name the cache's folder: DIR, or {_VARIABLE}")
    path = Path(text).expanduser()
    if not path.is_dir():
        parser.error(f"there is no folder {text!r}")
    return path


def _verify(folder: EmbeddingFolder, args: argparse.Namespace) -> int:
    count, bad = 0, []
    for entry in folder.entries(now_s=time.time()):
        why, removed = None, False
        try:
            with entry.path.open("rb", buffering=0) as file:
                try:
                    read_entry(file, bytes.fromhex(entry.key))
                except DamagedEntryError as error:
                    why, removed = str(error), args.remove and remove_damaged(entry.path, file)
        except FileNotFoundError:
            continue  # it was evicted meanwhile
        except OSError as error:
            why = f"it cannot be read: {error.strerror}"
        count += 1
        if why is not None:
            bad.append({**_named(entry), "path": str(entry.path), "why": why, "removed": removed})
    if args.json:
        _print_json({"entries": count, "bad": bad})
    else:
        for each in bad:
            print(f"BAD: {each['path']}: {each['why']}" + (" (removed)" if each["removed"] else ""))
        print(f"{count} entries, {len(bad)} bad")
    return int(bool(bad))


def _prune(folder: EmbeddingFolder, chosen: Collection[str], args: argparse.Namespace) -> None:
    now = time.time()
    if args.dry_run or not folder.root.is_dir():
        gone, left = _divided(list(folder.entries(now_s=now)), chosen, args, now)
    else:
        with folder.locked(wait=True):
            folder.sweep(now_s=now)
            going, left = _divided(list(folder.entries(now_s=now)), chosen, args, now)
            gone = folder.evict(going)
            for fingerprint in chosen:
                if all(entry.fingerprint != fingerprint for entry in left):
                    folder.remove_empty(fingerprint, unpin=args.unpin)
    gone_bytes, left_bytes = (sum(entry.bytes for entry in entries) for entries in (gone, left))
    if args.json:
        sums = {"removed_bytes": gone_bytes, "left_entries": len(left), "left_bytes": left_bytes}
        _print_json({"dry_run": args.dry_run, "removed": [_named(entry) for entry in gone], **sums})
        return
    pinned = sum(entry.pinned for entry in left)
    print(
        f"{'would remove' if args.dry_run else 'removed'} {len(gone)} entries, {show_size(gone_bytes)}; "
        f"{len(left)} are left, {show_size(left_bytes)}" + (f", {pinned} of them pinned" if pinned else "")
    )


def _divided(
    entries: Sequence[StoredEntry], chosen: Collection[str], args: argparse.Namespace, now: float
) -> tuple[list[StoredEntry], list[StoredEntry]]:
    """Return the entries to remove, and the others.

    Of the chosen fingerprints, those unused for --older-than go, then the least recently used until --max-size is left.
    Without both flags, all go. Pinned ones go with --unpin only.
    """
    looked_at = [entry for entry in entries if entry.fingerprint in chosen]
    loose = [entry for entry in looked_at if args.unpin or not entry.pinned]
    longest = args.older_than
    if longest is None:
        longest = float("inf") if args.max_size is not None else -float("inf")
    going = [entry for entry in loose if now - entry.used > longest]
    if args.max_size is not None:
        left = sum(entry.bytes for entry in looked_at) - sum(entry.bytes for entry in going)
        rest = [entry for entry in loose if now - entry.used <= longest]
        going += least_recently_used(rest, left - args.max_size)
    paths = {entry.path for entry in going}
    return going, [entry for entry in entries if entry.path not in paths]


def _chosen(parser: argparse.ArgumentParser, folder: EmbeddingFolder, args: argparse.Namespace) -> Collection[str]:
    if args.max_size is None and args.older_than is None and not args.fingerprint and not args.all_but:
        parser.error("say what to remove: --max-size, --older-than, --fingerprint or --all-but")
    known = folder.fingerprints()
    named = set()
    for start in args.fingerprint or args.all_but or ():
        fits = [fingerprint for fingerprint in known if fingerprint.startswith(start.lower())]
        if len(fits) != 1:
            parser.error(f"{len(fits)} fingerprints begin with {start!r}; there are: {', '.join(known) or 'none'}")
        named.update(fits)
    return named if args.fingerprint else set(known) - named


def _named(entry: StoredEntry) -> dict[str, Any]:
    return {"fingerprint": entry.fingerprint, "key": entry.key, "bytes": entry.bytes}


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
