"""What operators do to a whole server: its real processes, asked over HTTP."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vlmserve.server_process import PATIENCE_S, ServerProcess, await_that
from vlmserve.ipc.channels import Heartbeat


@pytest.fixture
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


def ask(server: ServerProcess, **fields: Any) -> tuple[int, Any]:
    messages = [{"role": "user", "content": "What is the colour of the sky on a day like this one?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return server.post("v1/chat/completions", **{**body, **fields})


def scheduler(server: ServerProcess) -> dict[str, int]:
    status, text = server.get("server_info")
    assert status == 200
    return json.loads(text)["scheduler"]


def num_pending(server: ServerProcess) -> int:
    return json.loads(server.get("server_info")[1])["num_pending"]


def await_figure(server: ServerProcess, name: str, value: int) -> None:
    await_that(lambda: scheduler(server)[name] == value)


def test_paused_it_takes_requests_and_ends_them_but_computes_nothing(server: ServerProcess) -> None:
    """They wait in front of the engine."""
    wanted = ask(server)[1]["choices"]
    assert server.post("pause_generation")[1]["paused"]
    assert json.loads(server.get("health")[1]) == {"status": "paused"}
    steps = scheduler(server)["forward_steps_total"]
    with ThreadPoolExecutor(2) as pool:
        kept, aborted = pool.submit(ask, server), pool.submit(ask, server, rid="mine")
        await_that(lambda: num_pending(server) == 2)
        assert server.post("abort_request", rid="mine") == (200, {"aborted": ["mine"]})
        assert aborted.result(PATIENCE_S)[0] == 499
        assert ask(server, timeout=0.1)[0] == 504
        assert num_pending(server) == 1
        assert scheduler(server)["forward_steps_total"] == steps
        assert server.post("continue_generation")[1]["paused"] is False
        assert kept.result(PATIENCE_S)[1]["choices"] == wanted
    assert server.post("continue_generation")[0] == 409


def test_cached_prefixes_are_forgotten(server: ServerProcess) -> None:
    assert server.post("flush_cache")[0] == 200  # sessions of other tests hold prefixes that do not count as cached
    ask(server)
    cached = scheduler(server)["kv_cached_tokens"]
    assert cached > 0
    assert server.post("flush_cache") == (200, {"flushed_tokens": cached})
    figures = scheduler(server)
    assert (figures["kv_cached_tokens"], figures["kv_free_tokens"]) == (0, 4096)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, server, max_tokens=3000)
        await_figure(server, "num_running_reqs", 1)
        status, refusal = server.post("flush_cache")
        assert (status, refusal["num_running_reqs"]) == (409, 1)
        assert "1 requests are running" in refusal["error"]["message"]
        assert len(server.post("abort_request", abort_all=True)[1]["aborted"]) == 1
        assert running.result(PATIENCE_S)[0] == 499
    # no waiting: whoever aborts is answered when nothing is left
    assert scheduler(server)["num_running_reqs"] == 0


def test_a_profile_has_the_steps_of_a_request(server: ServerProcess) -> None:
    status, started = server.post("start_profile", num_steps=3)
    assert status == 200
    assert server.post("start_profile")[0] == 409
    ask(server)
    await_that(lambda: not json.loads(server.get("server_info")[1])["profiling"])
    assert server.post("stop_profile")[0] == 409
    events = json.loads(gzip.decompress(Path(started["path"]).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::embedding" for event in events), "what the model computes"


def test_both_processes_show_that_they_live_and_wait(server: ServerProcess) -> None:
    [folder] = [path for path in server.directories() if path.parent == server.runtime]
    beats = [Heartbeat(folder / f"{name}.heartbeat") for name in ("scheduler", "detokenizer")]

    def turns() -> list[int]:
        """The last turn of each, once both wait for work again."""
        await_that(lambda: all(beat.look() <= 0 for beat in beats))
        return [-beat.look() for beat in beats]

    before = turns()
    ask(server)
    assert all(now >= then + 4 for now, then in zip(turns(), before, strict=True)), "a turn for each of four tokens"
