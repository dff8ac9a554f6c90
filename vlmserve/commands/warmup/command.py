"""The command line of `vlmserve warmup`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmserve.commands.batch.command_line import (
    INTERRUPTED,
    add_media_settings,
    input_parser,
    make_fetcher,
    run_checked,
    take_model,
)
from vlmserve.commands.batch.shared_files import refuse_shared_files
from vlmserve.config.checks import SettingsError
from vlmserve.config.flags import CommandParser
from vlmserve.config.settings import ServerSettings, iter_settings, load_settings

if TYPE_CHECKING:
    from vlmserve.commands.warmup.local import LocalTarget
    from vlmserve.commands.warmup.run import RemoteTarget

_ABOUT = """\
Encode pictures and videos ahead of time, so that servers with the same weights and settings start warm.

An INPUT is anything that `vlmserve caption` takes: a picture or video, a folder (searched with its subfolders), a
pattern in quotes, an http(s) or data URL, a list (.txt: one path or URL per line, # begins a comment), "-" (such a
list on standard input), a .jsonl file (each line a picture, a video, or a chat request whose media are encoded with
all their knobs), a .parquet file or a WebDataset .tar. Paths in a file are relative to its folder.

Without --url, this process loads the vision tower alone, and writes into --embedding-cache-dir. With --url, a running
server encodes; files and URLs are read here and sent to it.
"""
_EPILOG = """\
examples:
  vlmserve warmup pictures/ --embedding-cache-dir DIR
  vlmserve warmup Qwen/Qwen3-VL-2B-Instruct requests.jsonl --embedding-cache-dir DIR --pin --resume done.jsonl
  find . -name '*.mp4' | vlmserve warmup - --url http://127.0.0.1:8000 --errors failed.jsonl

The exit status is 1 if anything failed, 2 for a wrong command line, 130 if interrupted.
"""
_REQUEST_FIELDS = ("messages", "mm_processor_kwargs")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises VlmserveError or OSError if nothing can be done."""
    args = _parser().parse_intermixed_args(argv)
    with contextlib.ExitStack() as closing:
        return run_checked("warmup", lambda: _run(args, _settings(args), closing))


def _parser() -> CommandParser:
    parser = input_parser("warmup", about=_ABOUT, epilog=_EPILOG, words="words")
    parser.add_argument("--url", metavar="URL", help="let the server at http://host:port encode")
    parser.add_argument("--api-key", metavar="KEY", help="API key of that server [env: VLMSERVE_API_KEY]")
    text = "media, or requests of a .jsonl file, at a time; default: 4 with --url, else workers for media plus one"
    parser.add_argument("--concurrency", type=int, metavar="N", help=text)
    parser.add_argument("--pin", action="store_true", help="never evict entries that are encoded or found")
    text = "note finished inputs in FILE, and skip those that it lists unless their entries were evicted"
    parser.add_argument("--resume", type=Path, metavar="FILE", help=text)
    parser.add_argument("--errors", type=Path, metavar="FILE", help="write failures to FILE, one line of JSON each")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_media_settings(parser, more={"startup_timeout_s"}, left_out={"processor_cache_mib", "video_reference"})
    return parser


def _settings(args: argparse.Namespace) -> ServerSettings:
    """Load the settings. `args.words` has the inputs alone afterwards, and `args.concurrency` a number."""
    names = {setting.name for setting in iter_settings()}
    flags = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if args.url is None:
        args.words = take_model(args.words, flags)
    settings = load_settings(flags, config=args.config)
    engine = settings.engine
    if args.url is None and engine.embedding_cache_dir is None:
        raise SettingsError("name the folder that keeps embeddings (--embedding-cache-dir), or a server (--url)")
    if args.url is not None and ("model" in flags or "embedding_cache_dir" in flags):
        raise SettingsError("with --url, the server's own model and --embedding-cache-dir are used: name none here")
    if args.concurrency is None:
        args.concurrency = 4 if args.url is not None else engine.max_mm_workers + engine.media_processes + 1
    if args.concurrency < 1:
        raise SettingsError(f"--concurrency is {args.concurrency}; it must be 1 or more")
    return settings


def _run(args: argparse.Namespace, settings: ServerSettings, closing: contextlib.ExitStack) -> int:
    from vlmserve.commands.batch.inputs import local_files, open_inputs
    from vlmserve.commands.batch.progress import RunProgress
    from vlmserve.commands.warmup.run import WarmupJournal, WarmupRun, WarmupTally
    from vlmserve_common.logs import configure_logging

    fetcher = make_fetcher(settings)
    closing.callback(fetcher.close)
    stdin = io.BytesIO(sys.stdin.buffer.read() if "-" in args.words else b"")
    inputs = open_inputs(args.words, fetcher=fetcher, stdin=stdin, request_fields=_REQUEST_FIELDS)
    written = [("--errors", args.errors), ("--resume", args.resume)]
    read = local_files(args.words, [path for _, path in written if path is not None])
    refuse_shared_files(written, (("INPUT", path) for path in read))
    configure_logging(settings.log_level, "warmup")
    tally = WarmupTally()
    for number in inputs.count():
        tally.counted = number is not None
        tally.total = number or tally.total
    target = _make_target(args, settings)
    progress = RunProgress("warmup", tally, sys.stderr)
    notes: list[str] = []

    async def warm_up() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(target.close)
            stack.callback(lambda: notes.extend(target.notes()))
            stack.callback(closing.close)  # here, since threads that wait for downloads would keep the loop from ending
            errors = args.errors and stack.enter_context(args.errors.open("w", encoding="utf-8"))
            journal = args.resume and stack.enter_context(
                contextlib.closing(WarmupJournal(args.resume, target.settings))
            )
            stack.enter_context(progress)
            stack.callback(asyncio.create_task(progress.keep_shown()).cancel)
            run = WarmupRun(target=target, tally=tally, journal=journal, errors=errors, concurrency=args.concurrency)
            await run.run(iter(inputs))
            tally.total = tally.passed

    interrupted = False
    try:
        asyncio.run(warm_up())
    except KeyboardInterrupt:
        interrupted = True
    finally:
        seconds, tally.ignored = progress.seconds, inputs.ignored
        if args.json:
            told = {"seconds": round(seconds, 3), "interrupted": interrupted, "notes": notes}
            json.dump({**dataclasses.asdict(tally), **told}, sys.stdout, indent=2)
            print()
        else:
            print("\n".join([tally.describe(seconds), *notes]))
    return INTERRUPTED if interrupted else int(tally.failed > 0)


def _make_target(args: argparse.Namespace, settings: ServerSettings) -> LocalTarget | RemoteTarget:
    if args.url is not None:
        from vlmserve.commands.warmup.run import RemoteTarget

        return RemoteTarget(args.url, api_key=settings.api_key, pin=args.pin)
    from vlmserve.commands.warmup.local import LocalTarget

    return LocalTarget(settings, pin=args.pin)
