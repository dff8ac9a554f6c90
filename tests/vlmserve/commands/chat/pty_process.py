"""A command at a terminal of its own, typed into and read from as a person does."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.vlmserve.server_process import ROOT

PATIENCE_S = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class PtyProcess:
    """`vlmserve WORDS` on a pseudo-terminal. text: what it has shown, without colours."""

    def __init__(self, *words: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._end, theirs = pty.openpty()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLMSERVE_")}
        places = {"XDG_STATE_HOME": str(folder), "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vlmserve.cli", *words],
            cwd=folder,
            env={**inherited, **places, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(environment or {})},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.text = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def read_until(self, pattern: str) -> str:
        """What has come since the last call, up to the pattern's end."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = re.compile(pattern, re.DOTALL).search(self.text, self._seen)
            if found:
                new = self.text[self._seen : found.end()]
                self._seen = found.end()
                return new
            assert select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            try:
                data = os.read(self._end, 65536)
            except OSError:  # the other end is closed
                data = b""
            assert data, self.text
            self.text = _ESCAPES.sub("", self.text + data.decode(errors="replace")).replace("\r\n", "\n")

    def signal_at_prompt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ctrl-C (or another signal), once the prompt waits for keys: Python's readline notices one that comes between
        showing the prompt and waiting only at the next key."""
        status = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + PATIENCE_S
        while status.read_text().rsplit(")", 1)[1].split()[0] != "S":
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)  # another process's state can only be looked at
        if number is signal.SIGINT:
            self.type("\x03")
        else:
            self.process.send_signal(number)

    def ask(self, line: str) -> str:
        """Type a line; what is shown until the next prompt."""
        self.type(line + "\r")
        return self.read_until(r"\n> $").removesuffix("\n> ")

    def wait(self) -> int:
        """The exit status; what it still shows is read meanwhile."""
        with contextlib.suppress(AssertionError):
            self.read_until(r"\Z.")
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
