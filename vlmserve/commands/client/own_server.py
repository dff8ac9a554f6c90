"""Servers that commands talk to: one that runs already, or one of the command's own in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from vlmserve.commands.client.chat_client import ChatClient
from vlmserve.config.settings import ENV_PREFIX
from vlmserve_common.errors import EngineError, SettingsError
from vlmserve_common.process.child import die_with_parent
from vlmserve_common.process.stop_signals import made_whole


class OwnServer:
    """`vlmserve serve` on a port of 127.0.0.1 that the system chooses; `base_url` is http://127.0.0.1:PORT.

    A context manager. Make it in a thread that outlives it: the server ends with that thread, even if this process is
    killed. words: the command line, which may have a MODEL. environment: variables beside those of this process.
    startup_timeout_s: a limit beside the server's own. command: the module and first words, before `words`. Raises
    EngineError if the server does not start, or SettingsError if it refuses its settings.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        startup_timeout_s: float = float("inf"),
        command: Sequence[str] = ("vlmserve.cli", "serve"),
    ) -> None:
        self._folder = made_whole(partial(tempfile.TemporaryDirectory, prefix="vlmserve-own-"))
        port_file = Path(self._folder.name) / "port"
        whole = [sys.executable, "-m", *command, *words]
        whole += ["--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)]
        self._process = subprocess.Popen(
            whole,
            env={**os.environ, **(environment or {})},
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            process_group=0,  # a terminal's Ctrl-C reaches the command alone, which may go on
        )
        self.pid = self._process.pid
        deadline = time.monotonic() + startup_timeout_s
        try:
            while not port_file.exists():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    what = f"the server did not start (its last lines say why): vlmserve serve {' '.join(words)}"
                    raise (SettingsError if self._process.poll() == 2 else EngineError)(what)
                time.sleep(0.1)  # it is another process
        except BaseException:
            self.close()
            raise
        self.base_url = f"http://127.0.0.1:{port_file.read_text().strip()}"

    @property
    def status(self) -> int | None:
        """The exit status (negative: the signal that killed it); None while the server runs."""
        return self._process.poll()

    def wait(self) -> int:
        """The exit status, once the server has ended."""
        return self._process.wait()

    def close(self) -> None:
        """Stop the server and wait for it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTarget:
    """A model on a server. server: the command's own server; None if it runs without the command."""

    client: ChatClient
    model: str
    server: OwnServer | None = None


def model_at(url: str, *, api_key: str | None, name: str | None = None) -> ChatTarget:
    """Return a model of a running server. name: None takes the first that it lists. Raises ServerError."""
    client = ChatClient(url, api_key=api_key)
    return ChatTarget(client=client, model=name or asyncio.run(client.model()))


@contextlib.contextmanager
def own_model(words: Sequence[str]) -> Iterator[ChatTarget]:
    """Serve a model for this command alone, with a random API key. words: see `OwnServer`."""
    key = secrets.token_urlsafe()
    quiet = ("--log-level", "warning", "--shutdown-timeout-s", "0")
    with OwnServer([*quiet, *words], {ENV_PREFIX + "API_KEY": key}) as server:
        client = ChatClient(server.base_url, api_key=key)
        yield ChatTarget(client=client, model=asyncio.run(client.model()), server=server)
