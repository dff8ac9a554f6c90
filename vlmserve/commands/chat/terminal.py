"""The terminal: lines are edited and remembered, answers are shown as they come, and no output controls it."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

readline: ModuleType | None
try:
    import readline
except ImportError:  # a Python without readline: lines cannot be edited
    readline = None

_MOST_HISTORY = 1000
# Escape sequences begin with one of these: a model's text must not move the cursor or set the title.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _RED, _PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"


class Terminal:
    """Reads lines and shows text. history: file of earlier lines; None keeps none after the end."""

    def __init__(self, *, history: Path | None) -> None:
        self._history = history
        self._coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._in_a_line = False
        if readline is not None and history is not None and not _load_history(readline, history):
            self._history = None

    def complete(self, commands: Sequence[str]) -> None:
        """Let Tab complete these commands at a line's start, and paths elsewhere."""
        if readline is not None:
            _complete(readline, commands)

    def read_line(self, prompt: str) -> str:
        """Read a line. EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        before = readline.get_current_history_length() if readline is not None else 0
        line = input(prompt)
        if readline is not None and self._history is not None:
            new = readline.get_current_history_length() - before
            with contextlib.suppress(OSError):
                readline.append_history_file(max(0, new), str(self._history))
        return line

    def piece(self, text: str) -> None:
        """Show a part of an answer. Other methods begin a new line after it."""
        print(printable(text), end="", flush=True)
        self._in_a_line = not text.endswith("\n")

    def line(self, text: str) -> None:
        """Show a reply to a command."""
        self._print(printable(text))

    def note(self, text: str) -> None:
        """Show a remark, dimmed."""
        self._print(self._in(_DIM, text))

    def error(self, text: str) -> None:
        """Show an error, in red."""
        self._print(self._in(_RED, text))

    def end_line(self) -> None:
        """Begin a new line, if one has begun."""
        if self._in_a_line:
            print(flush=True)
        self._in_a_line = False

    def _print(self, text: str) -> None:
        self.end_line()
        print(text, flush=True)

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{printable(text)}{_PLAIN}" if self._coloured else printable(text)


def printable(text: str) -> str:
    """Return the text without control characters."""
    return _CONTROLS.sub("", text)


def history_file() -> Path:
    """Return the history file, in the user's folder for state (XDG)."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "vlmserve" / "chat_history"


@contextlib.contextmanager
def shown_while(doing: str, stream: TextIO) -> Iterator[None]:
    """Show the activity and its seconds during the block; nothing if `stream` is no terminal."""
    if not stream.isatty():
        yield
        return
    over, started = threading.Event(), time.monotonic()

    def show() -> None:
        while True:
            print(f"\r{printable(doing)} ... {time.monotonic() - started:.0f} s", end="", file=stream, flush=True)
            if over.wait(1.0):
                return

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield
    finally:
        over.set()
        shower.join()
        print("\r\x1b[K", end="", file=stream, flush=True)


def _load_history(lines: ModuleType, history: Path) -> bool:
    """Load or create the history, for this user alone. Returns False if that fails."""
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(history, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        lines.read_history_file(str(history))
        if lines.get_current_history_length() > 2 * _MOST_HISTORY:
            lines.set_history_length(_MOST_HISTORY)
            lines.write_history_file(str(history))
    except OSError:
        return False
    return True


def _complete(lines: ModuleType, commands: Sequence[str]) -> None:
    def complete(text: str, state: int) -> str | None:
        found: list[str] = []
        if lines.get_begidx() == 0:
            found = [command + " " for command in commands if text and command.startswith(text)]
        if not found:
            path = os.path.expanduser(re.sub(r"\\(.)", r"\1", text))
            paths = sorted(glob.glob(glob.escape(path) + "*"))
            found = [_escaped(each) + ("/" if os.path.isdir(each) else " ") for each in paths]
        return found[state] if state < len(found) else None

    lines.set_completer(complete)
    lines.set_completer_delims(" \t\n")
    lines.parse_and_bind("tab: complete")


def _escaped(path: str) -> str:
    return re.sub(r"""([\s\\'"])""", r"\\\1", path)
