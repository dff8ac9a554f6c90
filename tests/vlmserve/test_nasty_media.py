"""Files made to harm a server, sent to one with default settings while somebody else asks about ordinary pictures."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import pytest

from tests.nasty_media import NastyFile, jpeg_of_scans, nasty_files, slow_files
from tests.processors.clips import make_clip
from tests.processors.helpers import encoded, picture
from tests.vlmserve.server_process import ServerProcess, media_part, serving
from vlmserve.commands.bench.processes import children_of

MOST_S = 60.0  # for an answer, on a busy machine
MOST_SERVER_MIB, MOST_WORKERS_MIB = 512, 9216  # more than at first


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(tmp_path / "run") as made:
        yield made


def ask(client: openai.OpenAI, file: NastyFile) -> None:
    content = [media_part(file.kind, file.data), {"type": "text", "text": "What is there?"}]
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], max_tokens=1)


def outcome(client: openai.OpenAI, file: NastyFile) -> tuple[str, int, float, str]:
    """Name, status, seconds and message of its answer."""
    begun = time.monotonic()
    try:
        ask(client, file)
    except openai.APIStatusError as error:
        return file.name, error.status_code, time.monotonic() - begun, error.message
    return file.name, 200, time.monotonic() - begun, "answered"


def own_mib(pid: int) -> int:
    """Memory that it shares with nobody's file; 0 for one that has ended."""
    try:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) // 1024 if found else 0


class Watch:
    """Asks about ordinary pictures, one after the other and none twice, and looks at the server's memory meanwhile."""

    def __init__(self, server: ServerProcess) -> None:
        self.seconds: list[float] = []
        self._pid = server.process.pid
        # without API keys clients are told by their addresses
        elsewhere = openai.DefaultHttpxClient(transport=httpx2.HTTPTransport(local_address="127.0.0.2"))
        self._client = server.client().with_options(http_client=elsewhere)
        self._stop = threading.Event()
        self._first = self._look()
        self.server_mib = self.workers_mib = 0

    def ask(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            ask(self._client, NastyFile("", "image", encoded(picture(64, 48, len(self.seconds)), "JPEG")))
            self.seconds.append(time.monotonic() - begun)

    def look(self) -> None:
        while not self._stop.wait(0.1):
            server, others = self._look()
            self.server_mib = max(self.server_mib, server - self._first[0])
            self.workers_mib = max(self.workers_mib, others - self._first[1])

    def stop(self) -> None:
        self._stop.set()

    def _look(self) -> tuple[int, int]:
        try:
            others = children_of(self._pid)
        except (FileNotFoundError, ProcessLookupError):  # one has just ended
            return self._first
        return own_mib(self._pid), sum(map(own_mib, others))


@contextmanager
def watched(server: ServerProcess) -> Iterator[Watch]:
    """Fails unless others were answered in time, within bounded memory."""
    watch = Watch(server)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(watch.ask), threads.submit(watch.look)]
        try:
            yield watch
        finally:
            watch.stop()
        for one in running:
            one.result()
    assert max(watch.seconds) < MOST_S
    assert watch.server_mib < MOST_SERVER_MIB
    assert watch.workers_mib < MOST_WORKERS_MIB


def refuse_all(server: ServerProcess, files: Iterable[NastyFile], most_s: float) -> None:
    """Four at a time; each must be refused as the client's fault."""
    with server.client() as client, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda file: outcome(client, file), files))
    wrong = [answer for answer in answers if not 400 <= answer[1] < 500 or answer[2] > most_s]
    assert not wrong


@pytest.mark.slow
def test_each_nasty_file_is_refused_and_nobody_else_notices(server: ServerProcess) -> None:
    good = [NastyFile("clip", "video", make_clip(12)), NastyFile("picture", "image", encoded(picture(300, 200)))]
    with server.client() as client:
        for file in good:
            ask(client, file)
        with watched(server):
            refuse_all(server, [*slow_files(), *nasty_files()], MOST_S)
        # Whoever was ended has been replaced, and reads pictures and clips.
        again = [NastyFile("clip", "video", make_clip(13)), NastyFile("picture", "image", encoded(picture(301, 200)))]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda file: ask(client, file), [*again, *good]))
    assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_many_costly_pictures_keep_nobody_waiting(server: ServerProcess) -> None:
    """Each takes its whole time, and all but two wait; somebody else's pictures do not wait for all of them."""
    with watched(server) as watch:
        refuse_all(server, [NastyFile(str(n), "image", jpeg_of_scans(4000 + n, 15_000)) for n in range(24)], 180)
    assert len(watch.seconds) > 10
    assert max(watch.seconds) < 20, "the time of one of them, until a process is free, and not of two"
