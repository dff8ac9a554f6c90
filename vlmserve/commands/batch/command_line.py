"""The parts of a command line that `vlmserve caption` and `vlmserve warmup` have in common."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmserve.commands.client.media import PICTURES, VIDEOS
from vlmserve.config.checks import SettingsError
from vlmserve.config.flags import CommandParser, add_settings
from vlmserve.config.model_path import is_model
from vlmserve.config.settings import ServerSettings, iter_settings

if TYPE_CHECKING:
    from processors.fetch.fetching import BlockingFetcher

USAGE_ERROR, INTERRUPTED = 2, 130
"""Exit statuses."""

_INPUT_SUFFIXES = (*PICTURES, *VIDEOS, ".txt", ".jsonl", ".ndjson", ".parquet", ".pq", ".tar", ".tgz", ".gz")
_GROUPS = ("pictures", "videos", "sounds", "vision encoder")
_SETTINGS = {"model", "revision", "device", "dtype", "max_model_len", "num_threads", "log_level"}
# These have no effect in commands that read their own files.
_LEFT_OUT = {"allowed_local_media_path", "enable_mm_embeds", "max_queued_media", "encoder_listen"}


def input_parser(name: str, *, about: str, epilog: str, words: str) -> CommandParser:
    """Make the parser of a command with the words [MODEL] INPUT... words: the attribute that takes them."""
    usage = "%(prog)s [MODEL] INPUT... [options]"
    parser = CommandParser(prog=f"vlmserve {name}", usage=usage, description=about, epilog=epilog)
    text = "MODEL: checkpoint folder, or a Hugging Face hub id; left out: the small built-in one. INPUT: see above"
    parser.add_argument(words, metavar="[MODEL] INPUT...", nargs="+", help=text)
    return parser


def add_media_settings(
    parser: CommandParser, *, groups: tuple[str, ...] = (), more: set[str], left_out: set[str]
) -> None:
    """Add the flags of settings that concern media and the vision encoder.

    groups, more: further groups of settings, and single ones. left_out: settings without effect in this command.
    """
    names = {setting.name for setting in iter_settings() if setting.group in (*_GROUPS, *groups)}
    add_settings(parser, (names | _SETTINGS | more) - _LEFT_OUT - left_out)


def take_model(words: list[str], flags: dict[str, Any]) -> list[str]:
    """Move a MODEL that is the first word into `flags`. Returns the inputs. Raises SettingsError if there are none."""
    is_input = Path(words[0]).suffix.lower() in _INPUT_SUFFIXES  # a/b.png is no hub id
    if "model" in flags or is_input or not is_model(words[0], alone=len(words) == 1):
        return words
    flags["model"] = words[0]
    if len(words) == 1:
        raise SettingsError(f"{words[0]!r} is a model: name an INPUT, too")
    return words[1:]


def make_fetcher(settings: ServerSettings) -> BlockingFetcher:
    """Make the fetcher of the inputs. It reads local files everywhere, since the user has named them."""
    from processors.fetch.fetching import BlockingFetcher
    from vlmserve.frontend.stage import stage_limits

    return BlockingFetcher(dataclasses.replace(stage_limits(settings).fetch, allowed_local_media_path="/"))


def run_checked(name: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit status: after a SettingsError, its lines are printed and the status is 2."""
    try:
        return run()
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"vlmserve {name}: error: {line}", file=sys.stderr)
        return USAGE_ERROR
