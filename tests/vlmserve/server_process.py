"""A server in a process of its own, watched from the outside."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import mimetypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import openai

from vlmserve.commands.bench.processes import children_of
from vlmserve_common.kernels.build import LEVEL_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "assets" / "samples"
PATIENCE_S = 60.0


class ServerProcess:
    """A running command that logs like the launcher; `log` is its stderr so far. runtime: where its sockets go.

    environment: what is added to this process's own, without the settings in it.
    """

    def __init__(self, words: Sequence[str], runtime: Path, **environment: str) -> None:
        self.runtime = runtime
        self.runtime.mkdir(exist_ok=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name == LEVEL_VARIABLE or not name.startswith("VLMSERVE_")
        }
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**inherited, "XDG_RUNTIME_DIR": str(self.runtime), **environment},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._logged:
                self.log.append(line)
                self._logged.notify_all()

    def await_log(self, pattern: str) -> re.Match[str]:
        """Wait until the log holds the pattern."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self.log))

        with self._logged:
            assert self._logged.wait_for(found, PATIENCE_S), "".join(self.log)
            match = found()
        assert match is not None
        return match

    def port(self) -> int:
        return int(self.await_log(r"ready: http://127\.0\.0\.1:(\d+)").group(1))

    def client(self) -> openai.OpenAI:
        """A client that says at once what went wrong."""
        return openai_client(self.port())

    def get(self, path: str) -> tuple[int, str]:
        return self._ask("GET", path)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        status, text = self._ask("POST", path, json.dumps(body))
        return status, json.loads(text)

    def figures(self) -> dict[str, float]:
        """Those of /metrics whose only label is the model's name."""
        found = re.findall(r'^vlmserve:(\w+)\{model_name="[^"]*"\} ([\d.e+-]+)$', self.get("metrics")[1], re.MULTILINE)
        return {name: float(value) for name, value in found}

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, "/" + path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def children(self) -> dict[str, int]:
        """Pids of the scheduler and the detokenizer, by the names that they show."""
        names = ("scheduler", "detokenizer")
        await_that(lambda: self.processes().keys() >= set(names))
        return {name: self.processes()[name] for name in names}

    def processes(self) -> dict[str, int]:
        """Pids of all children, by the names that they show."""
        return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in children_of(self.process.pid)}

    def wait(self) -> int:
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def end(self) -> None:
        if self.process.poll() is None:
            abandoned = self.directories()
            os.killpg(self.process.pid, signal.SIGKILL)
            for path in abandoned:  # the next server would remove them; there may be none
                shutil.rmtree(path, ignore_errors=True)
        self.wait()

    def directories(self) -> list[Path]:
        """The private directories that the launcher holds open: for sockets, shared memory and uploaded files."""
        return private_directories(self.process.pid)


def data_url(file: Path) -> str:
    return f"data:{mimetypes.guess_type(file)[0]};base64,{base64.b64encode(file.read_bytes()).decode()}"


def media_part(kind: str, data: bytes, **knobs: Any) -> dict[str, Any]:
    """A picture (`image`) or clip (`video`) as a part of a message."""
    url = f"data:{'image/png' if kind == 'image' else 'video/mp4'};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}, **knobs}


def await_that(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


def openai_client(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


SMALL = "--port 0 --num-threads 1 --max-total-tokens 4096 --served-model-name tiny"


def serve(runtime: Path, *flags: str, model: Path | str | None = None, **environment: str) -> ServerProcess:
    """Start a small server of `model`, or of the built-in one; `flags` may override those of SMALL."""
    words = [sys.executable, "-m", "vlmserve.cli", "serve", *([] if model is None else [str(model)]), *SMALL.split()]
    return ServerProcess([*words, *flags], runtime, **environment)


@contextlib.contextmanager
def serving(runtime: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    """Run such a server for the time of a block."""
    server = serve(runtime, *flags, **options)
    try:
        yield server
    finally:
        server.end()


def private_directories(pid: int) -> list[Path]:
    """The directories of its own that a server's process holds open, and removes at the end."""
    targets = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that was closed meanwhile
            targets.append(Path(os.readlink(fd)))
    return [target for target in targets if target.name.startswith("vlmserve-") and target.is_dir()]


def await_ends(processes: Iterable[int]) -> None:
    """Wait for the ends of processes, which are given by their descriptors."""
    for fd in processes:
        assert wait([fd], PATIENCE_S), "a process outlives the server"
        os.close(fd)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
