"""A server that is stopped while embeddings are still on their way to the disk."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vlmserve.server_process import SAMPLES, ServerProcess, await_ends, data_url
from vlmserve.commands.bench.processes import children_of


@pytest.fixture
def start(run: Callable[..., ServerProcess], default_model: Path, tmp_path: Path) -> Callable[..., ServerProcess]:
    """A server with embeddings in `tmp_path`/cache that are written when there is something in the pipe `tmp_path`/go.
    It was asked about a picture, and has answered."""
    os.mkfifo(tmp_path / "go")

    def make(*words: str, **environment: str) -> ServerProcess:
        words = (str(default_model), f"embedding_cache_dir={tmp_path / 'cache'}", *words)
        server = run("tests.vlmserve.altered_server", *words, GO=str(tmp_path / "go"), **environment)
        ask(server)
        return server

    return make


def ask(server: ServerProcess) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(SAMPLES / "shapes.png")}}
    messages = [{"role": "user", "content": [image]}]
    answer = server.post("v1/chat/completions", model="tiny", messages=messages, max_tokens=1)[1]
    assert answer["usage"]["completion_tokens"] == 1


def entries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def end(server: ServerProcess, number: int) -> list[int]:
    """Send a signal to all processes, as a terminal does; their file descriptors."""
    pids = children_of(server.process.pid)
    watched = [os.pidfd_open(pid) for pid in pids]
    os.killpg(server.process.pid, number)
    return watched


def assert_nothing_is_left(server: ServerProcess, watched: list[int]) -> None:
    assert server.wait() == 0
    await_ends(watched)
    assert list(server.runtime.iterdir()) == []
    assert "does not stop" not in "".join(server.log)


def test_a_server_that_is_stopped_writes_what_waits_for_the_disk(start, tmp_path):
    server = start()
    assert entries(tmp_path / "cache") == []
    watched = end(server, signal.SIGINT)
    assert len(watched) >= 2
    server.await_log("finishing")
    go = os.open(tmp_path / "go", os.O_RDWR)
    os.write(go, b"1")
    assert_nothing_is_left(server, watched)
    os.close(go)
    [entry] = entries(tmp_path / "cache")
    assert entry.stat().st_size > 10_000
    assert "lost" not in "".join(server.log)


def test_threads_that_never_end_are_not_waited_for(run, default_model, tmp_path):
    """One of a pool of ours with a batch, one of asyncio's with a request."""
    words = (str(default_model), "shutdown_timeout_s=0.2")
    server = run("tests.vlmserve.altered_server", *words, STUCK="1", TMPDIR=str(tmp_path))
    with server.client() as ai, ThreadPoolExecutor(1) as threads:
        file = ai.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        ai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        threads.submit(server.post, "detokenize", tokens=[1])
        server.await_log("stuck\n(.*\n)*.*stuck")
        directories = server.directories()
        assert len(directories) == 3
        assert_nothing_is_left(server, end(server, signal.SIGTERM))
    assert not any(directory.exists() for directory in directories)
    assert list(tmp_path.iterdir()) == []
    assert re.search(r"ending without these threads, which still work: .*batch-files_0", "".join(server.log))


@pytest.mark.slow
def test_what_takes_too_long_is_lost_and_counted(start, tmp_path):
    server = start("encoder_dp_size=1", FINISH_S="0.2")
    watched = end(server, signal.SIGTERM)
    assert len(watched) >= 3, "an encoder process"
    assert_nothing_is_left(server, watched)
    server.await_log(r"1 embeddings were not on disk 0\.2 s after the end, and are lost")
    assert entries(tmp_path / "cache") == []
