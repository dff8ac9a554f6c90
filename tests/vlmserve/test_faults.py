"""Every process of a server killed, stopped or hung under load: each client has a clear answer in a stated time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vlmserve.server_process import PATIENCE_S, SAMPLES, SMALL, ServerProcess, await_that, gone, media_part

# What the documentation promises: a stopped process shows in /health, and a stopped server ends, within so long.
SEEN_WITHIN_S = 5.0
ENDS_WITHIN_S = 10.0
WATCHDOG_S = 3.0
# Two looks, the time for stacks, and a busy machine.
FIRES_WITHIN_S = WATCHDOG_S + 7.0


@pytest.fixture
def start(run: Callable[..., ServerProcess], default_model: Path, tmp_path: Path) -> Callable[..., ServerProcess]:
    """A server of the real launcher, with fake insides (`fake`), or with all its own."""

    def make(*flags: str, fake: bool) -> ServerProcess:
        if fake:
            return run("tests.vlmserve.fake_server", str(tmp_path), "--port", "0", *flags)
        small = (*SMALL.split(), "--max-total-tokens", "16384")
        return run("vlmserve.cli", "serve", str(default_model), *small, *flags)

    return make


def named(server: ServerProcess) -> dict[str, int]:
    """The pids of all processes of a server, by the names that they show."""
    return server.processes() | {"api": server.process.pid}


def await_status(server: ServerProcess, path: str, status: int, seconds: float) -> str:
    await_that(lambda: server.get(path)[0] == status, seconds)
    return server.get(path)[1]


# ------------------------------------------------------------ the launcher, with fake insides


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hung_scheduler_is_ended_and_its_stacks_are_logged(start, replicas: int) -> None:
    server = start("--watchdog-timeout-s", "2", "--dp-size", str(replicas), fake=True)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "freeze")
        server.await_log("frozen")
        children = server.processes()
        status, text = answer.result(2 + 7)
    assert status == 503
    which = "the scheduler process of replica 0" if replicas > 1 else "the scheduler process"
    assert f"{which} was at one step for 2 s (setting --watchdog-timeout-s)" in text
    assert server.wait() == 1
    log = "".join(server.log)
    assert 'fake_server.py", line' in log
    assert "in fake_scheduler" in log
    assert all(gone(pid) for pid in children.values())
    assert list(server.runtime.iterdir()) == []


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_stopped_process_shows_and_may_go_on(start, victim: str) -> None:
    server = start(fake=True)
    with ThreadPoolExecutor(1) as pool:
        assert server.get("hello") == (200, "hello")
        pid = server.children()[victim]
        os.kill(pid, signal.SIGSTOP)
        waiting = pool.submit(server.get, "waiting")
        text = await_status(server, "info", 503, SEEN_WITHIN_S)
        assert f"the {victim} process is stopped (SIGSTOP)" in text
        assert not waiting.done()
        os.kill(pid, signal.SIGCONT)
        assert waiting.result(PATIENCE_S) == (200, "waiting")
        await_status(server, "hello", 200, SEEN_WITHIN_S)


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_server_with_a_stopped_process_ends_soon(start, victim: str) -> None:
    server = start("--shutdown-timeout-s", "3600", fake=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.get, "hang")
        server.await_log("hanging")
        children = server.children()
        os.kill(children[victim], signal.SIGSTOP)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert waiting.result(ENDS_WITHIN_S) == (503, "the server is shutting down")
        assert server.wait() == 0
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert all(gone(pid) for pid in children.values())
    assert "does not stop" not in "".join(server.log), "it ended in order"


# ------------------------------------------------------------ the whole server, under load


class Load:
    """Clients that ask one question each: half of them streaming, all with a picture of their own if `pictures`."""

    def __init__(self, server: ServerProcess, *, clients: int = 8, tokens: int = 1500, pictures: bool = False) -> None:
        self._url = f"http://127.0.0.1:{server.port()}"
        self._pool = ThreadPoolExecutor(clients)
        self.answers: list[Future[tuple[int, str]]] = [
            self._pool.submit(self._ask, number, number % 2 == 1, tokens, pictures) for number in range(clients)
        ]

    def _ask(self, number: int, stream: bool, tokens: int, picture: bool) -> tuple[int, str]:
        content: list[dict[str, Any]] = [{"type": "text", "text": f"Number {number}: what is this?"}]
        if picture:
            shapes = (SAMPLES / "shapes.png").read_bytes()
            # another size, so that none finds another's in a cache
            content.insert(0, media_part("image", shapes, max_pixels=40000 + 4096 * number))
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
        body |= {"stream": stream, "ignore_eos": True}
        response = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        return response.status_code, response.text

    def results(self, seconds: float) -> list[tuple[int, str]]:
        """What each client got, within so long."""
        deadline = time.monotonic() + seconds
        try:
            return [answer.result(max(0.0, deadline - time.monotonic())) for answer in self.answers]
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


def await_running(server: ServerProcess, number: int) -> None:
    await_that(lambda: server.figures().get("num_requests_running") == number)


def assert_told(answers: list[tuple[int, str]], reason: str) -> None:
    """Each client was told why: by a status, or in its stream."""
    for status, text in answers:
        assert status in (200, 503), text
        error = [line for line in text.split("\n\n") if '"error"' in line][-1]
        assert reason in error
        assert (status == 200) == text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_engine_a_server_tells_all_clients_and_ends(start, victim: str, number: signal.Signals) -> None:
    server = start("--watchdog-timeout-s", f"{WATCHDOG_S:g}", fake=False)
    load = Load(server)
    await_running(server, 8)
    pids = named(server)
    os.kill(pids[victim], number)
    answers = load.results(SEEN_WITHIN_S if number == signal.SIGKILL else FIRES_WITHIN_S)
    reason = "was killed by SIGKILL" if number == signal.SIGKILL else f"was stopped for {WATCHDOG_S:g} s"
    assert_told(answers, f"the engine is gone (the {victim} process {reason}")
    assert server.wait() == 1
    assert all(gone(pid) for pid in pids.values())
    assert list(server.runtime.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_encoder_processes_are_replaced(start, number: signal.Signals) -> None:
    server = start("--encoder-dp-size", "1", "--encoder-timeout-s", "3", fake=False)
    server.port()
    os.kill(named(server)["encoder-0"], number)
    answers = Load(server, tokens=4, pictures=True).results(30.0)
    assert [status for status, _ in answers] == [200] * 8, answers


@pytest.mark.slow
def test_stopped_itself_it_answers_once_it_goes_on(start) -> None:
    server = start("--watchdog-timeout-s", f"{WATCHDOG_S:g}", fake=False)
    load = Load(server, tokens=300)
    await_running(server, 8)
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(2 * WATCHDOG_S)  # longer than the watchdog's patience: of others it must not think so
    assert not any(answer.done() for answer in load.answers)
    os.kill(server.process.pid, signal.SIGCONT)
    assert [status for status, _ in load.results(30.0)] == [200] * 8
    assert server.get("health")[0] == 200
