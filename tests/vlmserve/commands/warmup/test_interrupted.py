"""Runs that end in the middle: what was confirmed stays, and the next run goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.processors.web import Server, serve
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.commands.warmup.media import entries, lines, png, warmup
from tests.vlmserve.server_process import PATIENCE_S, ROOT


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint("qwen2_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture
def web():
    with serve() as web:
        yield web


def interrupted(number: int, web: Server, words: list[object]) -> tuple[int, str, str]:
    """Run the command until it asks the web server for what never comes, and send it a signal; status and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLMSERVE_")}
    command = [sys.executable, "-m", "vlmserve.cli", "warmup", *map(str, words), "--num-threads", "1", "--json"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # tests that a shell runs in the background ignore it, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert web.stalled.wait(PATIENCE_S)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_is_confirmed_survives(number, model, web, tmp_path, capsys):
    cache, journal, listed = tmp_path / "cache", tmp_path / "done.jsonl", tmp_path / "list.txt"
    names = [f"{place}.png" for place in range(4)]
    for place, name in enumerate(names):
        (tmp_path / name).write_bytes(png(place))
    words = [model, listed, "--embedding-cache-dir", cache, "--resume", journal]
    listed.write_text("\n".join([*names[:2], web.url("/stall"), *names[2:]]))
    # one at a time: when the third is asked for, two are done
    status, out, err = interrupted(number, web, [*words, "--concurrency", "1", "--allow-private-media"])
    assert len(lines(journal)) == 2
    assert all(set(line["keys"]) <= entries(cache) for line in lines(journal))
    if number == signal.SIGINT:
        assert status == 130
        summary = json.loads(out)
        assert (summary["interrupted"], summary["done"], summary["total"]) == (True, 2, 5)
        assert "Traceback" not in err
    listed.write_text("\n".join(names))
    summary = warmup(capsys, *words)
    assert (summary["skipped"], summary["done"], summary["encoded"]) == (2, 2, 2)


def test_encoder_processes_make_the_same_entries(model, tmp_path, capsys):
    for place in range(6):
        (tmp_path / f"{place}.png").write_bytes(png(place, 40 + 20 * place, 60))
    words = [model, f"{tmp_path}/*.png", "--embedding-cache-dir", tmp_path / "cache"]
    summary = warmup(capsys, *words, "--encoder-dp-size", "2")
    assert (summary["done"], summary["encoded"]) == (6, 6)
    summary = warmup(capsys, *words)
    assert (summary["encoded"], summary["found"]) == (0, 6)
