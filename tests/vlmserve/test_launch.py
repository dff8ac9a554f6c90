"""The launcher with fake processes in it: readiness, signals, deaths, and what is left behind (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vlmserve.server_process import PATIENCE_S, ServerProcess, await_that, gone
from vlmserve import cli
from vlmserve.api import launch


@pytest.fixture
def start(run: Callable[..., ServerProcess], tmp_path: Path) -> Callable[..., ServerProcess]:
    def make(*flags: str, port: int = 0, **environment: str) -> ServerProcess:
        return run("tests.vlmserve.fake_server", str(tmp_path), "--port", str(port), *flags, **environment)

    return make


def test_silent_connections_and_few_descriptors(tmp_path) -> None:
    """More of them than there may be open files, without and with the right to raise that."""
    for hard, warned in ((1024, True), (4096, False)):
        command = f'ulimit -Sn 1024; ulimit -Hn {hard}; exec "$0" "$@"'
        fake = ("-m", "tests.vlmserve.fake_server", str(tmp_path), "--port", "0")
        words = ["bash", "-c", command, sys.executable, *fake]
        with tempfile.TemporaryDirectory(prefix="v") as short:
            server = ServerProcess(words, Path(short) / "run")
            try:
                silent = [socket.create_connection(("127.0.0.1", server.port()), PATIENCE_S) for _ in range(1100)]
                assert server.get("hello") == (200, "hello")
                log = "".join(server.log)
                assert ("the system allows 1024 open files (ulimit -n): 512 connections are taken" in log) == warned
                assert "accept" not in log
                for link in silent:
                    link.close()
            finally:
                server.end()


def test_a_key_file_that_is_wrong_is_told_before_the_model_is_loaded(start, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one two three")
    server = start("--api-key-file", str(keys), FAKE_START="hang")
    assert server.wait() == 1
    assert "line 1: it has 3 words; it must be a name and a key" in "".join(server.log)


def test_a_killed_server_leaves_only_what_the_next_one_removes(start) -> None:
    with tempfile.TemporaryDirectory(prefix="v") as short:
        server = start(TMPDIR=short, XDG_RUNTIME_DIR="")
        server.port()
        server.process.kill()
        server.wait()
        assert [path.name for path in Path(short).iterdir() if not path.name.startswith("vlmserve-")] == []


@pytest.mark.parametrize("key", ["", "secret"])
def test_an_address_that_others_reach_without_a_key_is_warned_of(start, key: str) -> None:
    server = start("--host", "0.0.0.0", VLMSERVE_API_KEY=key)
    assert server.get("hello") == (200, "hello"), "the address that the log names can be opened"
    log = "".join(server.log)
    assert ("--host is 0.0.0.0, and there is no API key" in log) == (not key)
    assert ("set VLMSERVE_API_KEY or --api-key-file" in log) == (not key)
    assert "on all addresses (Ctrl-C" in log


def test_the_machine_s_own_address_needs_no_warning(start) -> None:
    server = start()
    server.port()
    assert "API key" not in "".join(server.log)
    assert "all addresses" not in "".join(server.log)


@pytest.mark.parametrize(
    ("words", "files", "complaint"),
    [
        ("no/such-folder/model", {}, "is neither a folder nor a hub id"),
        ("no/such.gguf", {}, "GGUF files cannot be read"),
        ("{folder}", {"tokenizer.json": "{}"}, "{folder} has no config.json: it is not a checkpoint"),
        ("{folder}", {"config.json": '{"model_type": "llama"}'}, "model_type 'llama' (architectures []) is not"),
        ("--chat-template {{%for%}}", {}, "the chat template is broken in line 1"),
        ("--max-model-len 4097", {}, "--max-model-len is 4097; the model was made for 4096 tokens"),
        ("--device cuda:99", {}, "--device is 'cuda:99', but "),
    ],
)
def test_what_is_cheap_to_check_is_checked_before_anything_starts(
    words: str, files: dict[str, str], complaint: str, tmp_path, monkeypatch, capsys
) -> None:
    """Even before the port, which is taken."""
    monkeypatch.setattr(launch, "configure_logging", lambda *_: None)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert cli.main(["serve", "--port", str(port), *words.format(folder=tmp_path).split()]) == 2
    assert complaint.format(folder=tmp_path) in capsys.readouterr().err


def test_serves_and_stops_in_order(start, tmp_path) -> None:
    port_file = tmp_path / "port"
    port_file.write_text("an older server's")
    server = start("--port-file", str(port_file), "--served-model-name", "fake")
    assert server.get("hello") == (200, "hello")
    assert int(port_file.read_text()) == server.port()
    status, text = server.get("info")
    assert (status, json.loads(text)) == (200, [123, "fake"])
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(server.get, map(str, range(32)))) == [(200, str(i)) for i in range(32)]
    children = server.children()
    directories = server.directories()
    assert [path.stat().st_mode & 0o777 for path in directories] == [0o700, 0o700]
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "frontend closed" in "".join(server.log)
    assert all(gone(pid) for pid in children.values())
    assert not any(path.exists() for path in (*directories, port_file))


def test_running_requests_finish_after_a_signal_to_the_whole_group(start) -> None:
    server = start()
    server.port()
    children = server.children()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "slow")
        server.await_log("postponed")
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
        server.await_log("running requests get")
        await_that(lambda: not _accepts(server.port()))
        os.kill(children["scheduler"], signal.SIGUSR1)
        assert answer.result(PATIENCE_S) == (200, "slow")
    assert server.wait() == 0


def test_children_never_see_the_signals_that_stop_the_server(start) -> None:
    """Held from birth, not only ignored once they run: Ctrl-C must not hit a child that is still importing."""
    server = start()
    server.port()
    for pid in server.children().values():
        status = Path(f"/proc/{pid}/status").read_text()
        held = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE).group(1), 16)
        ignored = int(re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE).group(1), 16)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert held >> (number - 1) & 1
            assert ignored >> (number - 1) & 1


def _accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("second_signal", [False, True])
def test_requests_that_do_not_finish_are_told(start, second_signal: bool) -> None:
    server = start("--shutdown-timeout-s", "3600" if second_signal else "1")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "hang")
        server.await_log("hanging")
        server.process.send_signal(signal.SIGTERM)
        if second_signal:
            server.await_log("running requests get")
            server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert answer.result(PATIENCE_S) == (503, "the server is shutting down")


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_dead_child_fails_pending_requests_and_ends_the_server(start, victim: str) -> None:
    server = start()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.get, "hang")
        server.await_log("hanging")
        children, directories = server.children(), server.directories()
        killed = time.monotonic()
        os.kill(children[victim], signal.SIGKILL)
        status, text = answer.result(PATIENCE_S)
        noticed = time.monotonic() - killed
    assert status == 503
    assert f"the {victim} process was killed by SIGKILL" in text
    assert noticed < 5, "it is noticed by an event, not by a timeout"
    assert server.get("hello")[0] == 503
    assert server.wait() == 1
    assert all(gone(pid) for pid in children.values())
    assert len(directories) == 2
    assert not any(path.exists() for path in directories)


def test_a_dead_child_of_a_replica_is_named_and_ends_all(start) -> None:
    server = start("--dp-size", "2")
    assert json.loads(server.get("info")[1])[0] == 122, "the smallest context of both"
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server.get, f"hang{n}") for n in range(2)]
        server.await_log(r"hanging[\s\S]*hanging")  # two processes may write one line
        names = server.processes()
        assert {f"r{n}-{kind}" for n in range(2) for kind in ("scheduler", "detokenizer")} <= names.keys()
        directories = server.directories()
        os.kill(names["r1-detokenizer"], signal.SIGKILL)
        for answer in answers:
            status, text = answer.result(PATIENCE_S)
            assert status == 503
            assert "the detokenizer process of replica 1 was killed by SIGKILL" in text
    assert server.wait() == 1
    assert all(gone(pid) for pid in names.values())
    assert not any(path.exists() for path in directories)


def test_replicas_finish_beside_each_other(start, tmp_path) -> None:
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    server = start("--dp-size", "2", MEET_AT_THE_END=str(meeting))
    server.port()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "does not stop" not in "".join(server.log)


def test_children_die_with_a_killed_launcher_and_the_next_start_clears_up(start) -> None:
    server = start()
    server.port()
    children, directories = server.children(), server.directories()
    server.process.kill()
    await_that(lambda: all(gone(pid) for pid in children.values()))
    server.wait()
    assert all(path.is_dir() for path in directories)
    for path in directories:
        os.utime(path, (0, 0))  # long ago
    successor = start()
    assert successor.get("hello") == (200, "hello")
    assert not any(path.exists() for path in directories)
    assert all(path.exists() for path in successor.directories())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", r"error: .* lacks model\.norm\.weight\n$"),
        ("crash", r"error: ZeroDivisionError: a bug\n$"),
        ("exit", r"error: the scheduler process ended with status 7 while starting\n$"),
    ],
)
def test_a_failure_to_start_is_told_in_one_line(start, how: str, message: str) -> None:
    server = start(FAKE_START=how)
    assert server.wait() == 1
    log = "".join(server.log)
    assert re.search(message, log)
    assert ("Traceback" in log) == (how == "crash"), "a traceback is for bugs only"
    assert not list(server.runtime.iterdir())


def test_a_start_that_takes_too_long_ends(start) -> None:
    server = start("--startup-timeout-s", "0.5", FAKE_START="hang")
    assert server.wait() == 1
    assert "not ready after 0.5 s: scheduler" in "".join(server.log)


def test_what_an_encoder_process_is_late_with_is_told_as_that(start) -> None:
    flags = ("--startup-timeout-s", "0.5", "--log-level", "warning", "--encoder-dp-size", "1")
    server = start(*flags, FAKE_START="late")
    assert server.wait() == 1
    assert server.log[-1] == "error: no encoder after 0.5 s, with the log at warning\n"


def test_a_child_that_has_nothing_to_be_forked_of_is_told(start, tmp_path) -> None:
    (tmp_path / "broken_library.py").write_text('raise OSError("libbroken.so is not there")')
    server = start(FAKE_IMPORTS="broken_library", PYTHONPATH=str(tmp_path))
    assert server.wait() == 1
    assert "OSError: libbroken.so is not there\n" in server.log
    assert server.log[-1] == (
        "error: the scheduler process cannot start: the process that it would be a fork of has ended\n"
    )
    assert not list(server.runtime.iterdir())


def test_a_signal_while_starting_ends_it(start) -> None:
    server = start(FAKE_START="hang")
    await_that(lambda: len(list(server.runtime.glob("*/detokenizer"))) == 1)
    children = server.children()
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait() == 0
    assert all(gone(pid) for pid in children.values())
    assert not list(server.runtime.iterdir())
    assert "Traceback" not in "".join(server.log)


def test_a_taken_port_is_known_before_anything_starts(start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = start(port=port)
        assert server.wait() == 1
    log = "".join(server.log)
    assert f"cannot listen on --host 127.0.0.1 --port {port}: Address already in use" in log
    assert not list(server.runtime.iterdir())
