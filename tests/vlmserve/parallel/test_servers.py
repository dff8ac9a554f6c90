"""Servers of ranks, of stages, and of groups: answers as of one process, and the end of all of them."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import time
from pathlib import Path

import openai
import pytest

from tests.ports import free_port
from tests.tiny_checkpoints import MOE, make_checkpoint
from tests.vlmserve.parallel.sharing import GREEDY, SETTINGS, answer_of, name_of, start_server
from tests.vlmserve.server_process import PATIENCE_S, gone
from vlmserve import LLM
from vlmserve.commands.bench.processes import children_of
from vlmserve_common.errors import DeviceLostError

STAGES = ["--tp-size", "1", "--pp-size", "2"]


def model_alone(folder: Path, family: str = "qwen3_vl") -> str:
    """Make a checkpoint, and return what one process answers."""
    with LLM(str(make_checkpoint(family, folder)), **SETTINGS) as llm:
        return llm.chat("Name a colour.", GREEDY).text


def rank_1(parent: int) -> int:
    (rank,) = (pid for pid in children_of(parent) if name_of(pid) == "rank-1")
    return rank


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, pytest.param({"pp_size": 2}, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named_and_nobody_waits(sizes: dict[str, int], tmp_path: Path):
    folder = make_checkpoint("qwen2_vl", tmp_path / "model")
    with LLM(str(folder), **sizes, **SETTINGS) as llm:
        llm.chat("Name a colour.", GREEDY)
        os.kill(rank_1(os.getpid()), signal.SIGKILL)
        with pytest.raises(DeviceLostError, match="the process of rank 1 was killed by SIGKILL"):
            llm.chat("Name a colour.", GREEDY)


@pytest.mark.parametrize("words", [[], pytest.param(STAGES, marks=pytest.mark.slow)], ids=["ranks", "stages"])
def test_a_server_answers_and_ends_when_a_rank_is_killed(words: list[str], tmp_path: Path):
    """In the midst of an answer: the client hears of it, and no process is left."""
    alone = model_alone(tmp_path / "model")
    server = start_server(tmp_path / "model", tmp_path / "run", *words)
    try:
        assert answer_of(server) == alone
        everybody = children_of(server.process.pid)
        stream = server.client().completions.create(
            model="m", prompt="Name", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        began = time.monotonic()
        os.kill(rank_1(server.process.pid), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the rank-1 process was killed by SIGKILL"):
            for _ in stream:
                pass
        assert server.wait() == 1
        assert time.monotonic() - began < 20
        assert "stopped: the rank-1 process was killed by SIGKILL" in "".join(server.log)
        deadline = time.monotonic() + PATIENCE_S  # the process that the others are forks of ends by itself
        while not all(gone(pid) for pid in everybody):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        server.end()


@pytest.mark.parametrize("words", [[], pytest.param(STAGES, marks=pytest.mark.slow)], ids=["ranks", "stages"])
@pytest.mark.slow
def test_two_nodes_have_a_server_together(words: list[str], tmp_path: Path):
    """The second one starts first, and has a checkpoint folder of its own. It ends after the first one."""
    folders = [tmp_path / str(node) for node in range(2)]
    make_checkpoint("qwen3_vl", folders[1])
    alone = model_alone(folders[0])
    words = [*words, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank"]
    second, first = (start_server(folders[node], tmp_path / f"run{node}", *words, str(node)) for node in (1, 0))
    try:
        assert answer_of(first) == alone
        second.await_log("ready: ranks 1 work for 127.0.0.1:")
        first.process.send_signal(signal.SIGTERM)
        assert (first.wait(), second.wait()) == (0, 1)
        assert "rank 1 of 2 lost another one" in "".join(second.log)
        assert "stopped: the rank-1 process ended with status 1" in "".join(second.log)
    finally:
        for node in (first, second):
            node.end()


GROUPS = ["--dp-size", "2", "--enable-dp-attention"]


@pytest.mark.parametrize("words", [[], *(pytest.param(words, marks=pytest.mark.slow) for words in (STAGES, GROUPS))])
def test_a_profile_has_the_steps_of_all_ranks(words: list[str], tmp_path: Path):
    """In one file, at the same time; and a second one after it."""
    make_checkpoint("qwen3_vl", tmp_path / "model")
    (tmp_path / "profiles").mkdir()
    server = start_server(tmp_path / "model", tmp_path / "run", *words, "--profile-dir", str(tmp_path / "profiles"))
    try:
        before = answer_of(server)
        paths = []
        for _ in range(2):
            assert server.post("start_profile")[0] == 200
            assert answer_of(server) == before
            paths.append(Path(server.post("stop_profile")[1]["path"]))
            assert answer_of(server) == before
    finally:
        server.end()
    assert sorted((tmp_path / "profiles").iterdir()) == sorted(paths)
    for path in paths:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        computed = [event for event in events if event.get("cat") == "cpu_op"]
        spans = {}
        for pid, name in names.items():
            times = [event["ts"] for event in computed if event["pid"] == pid]
            if times:
                spans[name.partition(":")[0]] = min(times), max(times)
        assert spans.keys() == {"rank 0", "rank 1"}
        (first, last), (other_first, other_last) = spans.values()
        assert first < other_last
        assert other_first < last


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_answers_by_each_group(nodes: int, tmp_path: Path):
    alone = model_alone(tmp_path / "model", MOE)
    words = ["--dp-size", "2", "--enable-dp-attention", "--ep-size", "2"]
    if nodes == 2:
        words += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    servers = [
        start_server(tmp_path / "model", tmp_path / f"{node}", *words, "--node-rank", str(node))
        for node in reversed(range(nodes))
    ]
    try:
        assert [answer_of(servers[-1], data_parallel_rank=group) for group in (0, 1, None)] == [alone] * 3
        metrics = servers[-1].get("metrics")[1]
        for group in range(2):
            (line,) = re.findall(rf'replica_generation_tokens_total{{.*replica="{group}"}} (.*)', metrics)
            assert float(line) >= 8
    finally:
        for server in servers:
            server.end()
