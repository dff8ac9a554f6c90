"""`vlmserve chat` as scripts call it, and with a server of its own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.vlmserve.commands.chat.pty_process import PtyProcess
from tests.vlmserve.commands.served import fake_server
from tests.vlmserve.server_process import ROOT, gone, private_directories
from vlmserve import cli
from vlmserve.commands.bench.processes import children_of
from vlmserve.commands.demo.pictures import FOLDER

PICTURE = str(FOLDER / "red-circle.png")


@pytest.fixture(scope="module")
def server(checkpoint):
    with fake_server(checkpoint) as (served, url):
        served.scheduler.say("red")
        yield served, f"{url}/v1"


def run(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLMSERVE_")}
    command = [sys.executable, "-m", "vlmserve.cli", "chat", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, input=stdin, capture_output=True, check=False)


def assert_refused(words: list[str], status: int, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command in this process."""
    at_hang_up = signal.getsignal(signal.SIGHUP)
    try:
        ended = cli.main(["chat", *words])
    except SystemExit as error:
        ended = error.code
    finally:
        signal.signal(signal.SIGHUP, at_hang_up)
    told = capsys.readouterr()
    assert (ended, told.out) == (status, "")
    assert complaint in told.err


def test_the_answer_alone_is_printed(served, url):
    done = run("--url", url, "--ask", "What is this?", PICTURE, "--temperature", "0", "--set", "seed=3", "--top-p=0.5")
    assert (done.stdout, done.stderr, done.returncode) == (b"red\n", b"", 0)
    request = served.scheduler.requests[-1]
    assert len(request.mm_inputs.items) == 1
    assert (request.sampling_params.temperature, request.sampling_params.seed) == (0, 3)


def test_a_question_and_a_picture_on_standard_input(served, url):
    assert run("--url", url, PICTURE, stdin=b"What is this?\n").stdout == b"red\n"
    done = run("--url", url, "-", "--ask", "What is this?", stdin=Path(PICTURE).read_bytes())
    assert done.stdout == b"red\n"
    one, other = served.scheduler.requests[-2:]
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.mm_inputs.items[0].digest == other.mm_inputs.items[0].digest


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["--ask", "?", "no.png"], 1, "vlmserve: error: there is no file 'no.png'"),
        (["--ask", "?", "--temperature", "warm"], 2, "error: temperature is 'warm'; it must be a number"),
        (["--ask", "?", "--set", "sed=1"], 2, "error: there is no option 'sed'; did you mean seed?"),
        (["--ask", "?", "--page-size", "1"], 2, "--page-size has no place here"),
        (["--ask", "?", "--no-such-flag"], 2, "--no-such-flag"),
        ([], 2, "there is no question"),
    ],
)
def test_what_goes_wrong_is_on_stderr(words, status, complaint, url, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert_refused(["--url", url, *words], status, complaint, capsys)


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["--page-size", "0"], 2, "--page-size is 0; it must be 1 or more"),
        (["--api-key", "x"], 2, "--api-key goes with --url"),
        (["no-such-model"], 2, "'no-such-model' is neither a folder nor a hub id"),
        (["no-such/cat.png"], 1, "there is no file 'no-such/cat.png'"),
        (["assets/samples"], 2, "'assets/samples' has no config.json: it is no model"),
        (["--url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9/v1"),
    ],
)
def test_no_server_to_talk_to(words, status, complaint, capsys):
    assert_refused([*words, "--ask", "?"], status, complaint, capsys)


def test_an_interrupted_answer_ends_with_130(served, url):
    served.scheduler.pause_after = 0
    before = len(served.scheduler.requests)
    command = [sys.executable, "-m", "vlmserve.cli", "chat", "--url", url, "--ask", "?"]
    try:
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            served.scheduler.wait_until(lambda: len(served.scheduler.requests) > before)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == (b"\n", b"")
        assert process.returncode == 130
    finally:
        served.scheduler.pause_after = None


@pytest.mark.slow
def test_a_server_of_its_own_survives_ctrl_c_and_ends_with_the_chat(tmp_path):
    flags = ["--num-threads", "1", "--dtype", "float32", "--temperature", "0"]
    with closing(PtyProcess("chat", str(FOLDER / "shapes.png"), *flags, folder=tmp_path)) as chat:
        assert "Starting a server for the small built-in model ... 0 s" in chat.read_until("vlmserve-default: ask away")
        chat.read_until("> $")
        chat.signal_at_prompt()
        chat.read_until("> $")
        assert "\nA red circle, a green triangle, a yellow star and a blue square.\n" in chat.ask(
            "Describe the picture."
        )
        chat.ask("/new")
        clip = chat.ask(f"{FOLDER / 'turns-green.mp4'} What happens in the video?")
        assert "\nA blue square turns green.\n" in clip
        processes = children_of(chat.process.pid)
        directories = [path for pid in processes for path in private_directories(pid)]
        assert len(processes) >= 3
        chat.signal_at_prompt(signal.SIGHUP)  # as when its window is closed
        assert chat.wait() == 128 + signal.SIGHUP
        assert all(map(gone, processes))
        assert not any(path.exists() for path in directories)
        assert list(tmp_path.iterdir()) == [tmp_path / "vlmserve"], "only the history is left"
