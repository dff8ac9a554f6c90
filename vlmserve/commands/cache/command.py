"""The command: which part of the cache, what to do, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision.cache.folder import EmbeddingFolder, StoredEntry
from vlmserve.commands.cache.quantities import age, show_size, size
from vlmserve.commands.cache.show import list_entries, print_entries, print_summary, summarise
from vlmserve.commands.cache.tend import PruneRules, prune, verify
from vlmserve.config.flags import CommandParser
from vlmserve.config.number_words import positive
from vlmserve.config.settings import ENV_PREFIX

_VARIABLE = f"{ENV_PREFIX}EMBEDDING_CACHE_DIR"
_EPILOG = """\
examples:
  vlmserve cache ls DIR --limit 20
  vlmserve cache stats DIR
  vlmserve cache verify DIR --remove
  vlmserve cache prune DIR --max-size 10GiB
  vlmserve cache prune DIR --older-than 7d --dry-run
"""


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, or 1 when `verify` finds a bad entry. OSError when the folder cannot be read or written."""
    parser = _parser()
    args = parser.parse_args(argv)
    folder = EmbeddingFolder(_directory(parser, args.dir))
    if args.command == "ls":
        (_print_json if args.json else print_entries)(list_entries(folder, args.limit))
        return 0
    if args.command == "stats":
        (_print_json if args.json else print_summary)(summarise(folder))
        return 0
    if args.command == "verify":
        return _verify(folder, args)
    return _prune(folder, _rules(parser, folder, args), args)


def _parser() -> argparse.ArgumentParser:
    common = CommandParser(add_help=False)
    common.add_argument("dir", metavar="DIR", nargs="?", help=f"the cache's folder [env: {_VARIABLE}]")
    common.add_argument("--json", action="store_true", help="print JSON")
    parser = CommandParser(
        prog="vlmserve cache",
        description="Look at the embedding cache on disk and clear it. Servers may go on using it meanwhile.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, parents=[common], help=about, description=f"{about.capitalize()}.", allow_abbrev=False
        )

    listing = add("ls", "list entries, the last used first")
    listing.add_argument("--limit", type=positive, metavar="N", help="list no more than these")
    add("stats", "count entries and bytes, model by model")
    verifying = add("verify", "read every entry, name the bad ones and exit with 1 if there are any")
    verifying.add_argument("--remove", action="store_true", help="remove damaged entries")
    pruning = add("prune", "remove entries that are old, or too many, or of models no longer served")
    text = "those not used for longest, until no more than e.g. 10GiB are left"
    pruning.add_argument("--max-size", type=size, metavar="SIZE", help=text)
    pruning.add_argument("--older-than", type=age, metavar="AGE", help="those not used for longer than e.g. 7d or 12h")
    which = pruning.add_mutually_exclusive_group()
    text = "those of this fingerprint (or how it begins); with the flags above: of those only; may be repeated"
    which.add_argument("--fingerprint", action="append", metavar="F", help=text)
    which.add_argument("--all-but", action="append", metavar="F", help="the same, of all other fingerprints")
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
    count, bad = verify(folder, remove=args.remove)
    if args.json:
        found = [{**_named(entry), "path": str(entry.path), "why": why, "removed": gone} for entry, why, gone in bad]
        _print_json({"entries": count, "bad": found})
    else:
        for entry, why, gone in bad:
            print(f"BAD: {entry.path}: {why}" + (" (removed)" if gone else ""))
        print(f"{count} entries, {len(bad)} bad")
    return int(bool(bad))


def _prune(folder: EmbeddingFolder, rules: PruneRules, args: argparse.Namespace) -> int:
    gone, left = prune(folder, rules, dry_run=args.dry_run)
    gone_bytes, left_bytes = (sum(entry.bytes for entry in entries) for entries in (gone, left))
    if args.json:
        sums = {"removed_bytes": gone_bytes, "left_entries": len(left), "left_bytes": left_bytes}
        _print_json({"dry_run": args.dry_run, "removed": [_named(entry) for entry in gone], **sums})
        return 0
    pinned = sum(entry.pinned for entry in left)
    print(
        f"{'would remove' if args.dry_run else 'removed'} {len(gone)} entries, {show_size(gone_bytes)}; "
        f"{len(left)} are left, {show_size(left_bytes)}" + (f", {pinned} of them pinned" if pinned else "")
    )
    return 0


def _rules(parser: argparse.ArgumentParser, folder: EmbeddingFolder, args: argparse.Namespace) -> PruneRules:
    if args.max_size is None and args.older_than is None and not args.fingerprint and not args.all_but:
        parser.error("say what to remove: --max-size, --older-than, --fingerprint or --all-but")
    known = folder.fingerprints()
    named = set()
    for start in args.fingerprint or args.all_but or ():
        fits = [fingerprint for fingerprint in known if fingerprint.startswith(start.lower())]
        if len(fits) != 1:
            parser.error(f"{len(fits)} fingerprints begin with {start!r}; there are: {', '.join(known) or 'none'}")
        named.update(fits)
    chosen = named if args.fingerprint else set(known) - named
    return PruneRules(fingerprints=chosen, older_than_s=args.older_than, max_bytes=args.max_size, unpin=args.unpin)


def _named(entry: StoredEntry) -> dict[str, Any]:
    return {"fingerprint": entry.fingerprint, "key": entry.key, "bytes": entry.bytes}


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
