"""A demo in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio_client

from tests.vlmserve.server_process import ROOT
from vlmserve.commands.demo.pictures import FOLDER


class Demo:
    """A `vlmserve demo` that says what it is doing. folder: where its temporary files and sockets go."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLMSERVE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vlmserve.cli", "demo", "--port", "0", *words],
            cwd=ROOT,
            env={**environment, "TMPDIR": str(self.temporary), "XDG_RUNTIME_DIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stderr is not None
        self.first_words = self.process.stderr.readline()
        found = re.search(r" and loading the page: (http://127\.0\.0\.1:\d+/) ", self.first_words)
        assert found is not None, self.first_words
        self.url = found[1]

    def ready(self) -> str:
        """The model's name, once it is there."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(rf"vlmserve demo: (\S+) at {re.escape(self.url)}\n", line)
        assert found is not None, line + self.process.stderr.read()
        return found[1]

    def ask(self, text: str, *files: str) -> list[Any]:
        client = gradio_client.Client(self.url, download_files=False, verbose=False, analytics_enabled=False)
        with closing(client):
            media = [gradio_client.handle_file(str(FOLDER / file)) for file in files]
            return client.predict({"text": text, "files": media}, [], api_name="/ask")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
