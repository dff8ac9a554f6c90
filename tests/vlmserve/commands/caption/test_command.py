"""`vlmserve caption` from end to end, with the built-in model."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.processors.clips import make_clip
from tests.vlmserve.commands.caption.runs import captions_in, lines
from tests.vlmserve.commands.warmup.media import png
from tests.vlmserve.reference import picture
from tests.vlmserve.server_process import ROOT, ServerProcess
from vlmserve import LLM, SamplingOverrides, cli
from vlmserve.commands.caption.journal import CaptionJournal

PATIENCE_S = 120.0
FEW = ["--num-threads", "1", "--media-processes", "1", "--max-total-tokens", "8192"]


def fill(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03d}.png").write_bytes(png(number))
    return folder


def caption(capsys, *words: object, status: int = 0) -> dict:
    """Run the command in this process; its summary."""
    capsys.readouterr()
    assert cli.main(["caption", *map(str, words), "--json", *FEW]) == status, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def start(*words: object, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vlmserve.cli", "caption", *map(str, words), *FEW]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **more
    )


def wait_for_lines(out: Path, process: subprocess.Popen[str]) -> None:
    while not out.exists() or out.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        threading.Event().wait(0.05)  # for another process, not synchronising with it


def group_is_gone(leader: int) -> bool:
    """Whether no process is left of a command's; waits for the ones that are going."""
    gone = threading.Event()
    for _ in range(200):
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        gone.wait(0.05)  # for another process, not synchronising with it
    return False


def test_a_folder_of_all_sorts(capsys, tmp_path):
    folder = fill(tmp_path / "in", 5)
    (folder / "again.png").write_bytes(png(0))
    (folder / "clip.mp4").write_bytes(make_clip(30))
    (folder / "broken.png").write_bytes(png(3)[:200])
    (folder / "prompt.txt").write_text("What is in {{ folder }}?")
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    words = [folder, "--output", out, "--errors", errors, "--max-tokens", 8, "--max-pixels", 20_000]
    told = caption(capsys, *words, status=3)
    assert (told["done"], told["reused"], told["failed"], told["total"], told["counted"]) == (6, 1, 1, 8, True)
    (error,) = lines(errors)
    assert (error["id"], error["code"]) == (str(folder / "broken.png"), "invalid_image")
    there = dict(captions_in(out))
    assert there[str(folder / "again.png")] == there[str(folder / "000.png")]

    with LLM(num_threads=1, max_total_tokens=8192) as llm:
        for name in ("001.png", "clip.mp4"):
            kind = "video" if name.endswith("mp4") else "image"
            part = {"type": kind, kind: folder / name, "max_pixels": 20_000}
            chat = [{"role": "user", "content": [part, {"type": "text", "text": "What is in in?"}]}]
            expected = llm.chat(chat, SamplingOverrides(max_new_tokens=8, temperature=0.0)).text
            assert there[str(folder / name)] == expected

    again = caption(capsys, *words, status=3)
    assert (again["done"], again["skipped"], again["failed_before"]) == (0, 7, 1)
    (folder / "broken.png").write_bytes(png(3))  # mended
    mended = caption(capsys, *words)
    assert (mended["skipped"], mended["done"] + mended["reused"]) == (7, 1)
    assert lines(errors) == []


def test_tables_in_and_several_captions_out(capsys, tmp_path):
    rows = [{"image": f"{number}.png", "kind": "shape", "id": f"row {number}"} for number in range(3)]
    for number in range(3):
        picture(number, 64, 64).save(tmp_path / f"{number}.png")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    out = tmp_path / "out.parquet"
    words = [tmp_path / "in.jsonl", "--output", out, "--prompt", "Which {{ kind }}?", "--num-captions", 2]
    caption(capsys, *words, "--max-tokens", 4, status=3)
    import pyarrow.parquet as pq

    table = pq.read_table(out).to_pylist()
    assert sorted(row["id"] for row in table) == ["row 0", "row 1", "row 2"]
    assert all(len(row["captions"]) == 2 and row["prompt"] == "Which shape?" for row in table)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_ended_run_goes_on_and_leaves_nothing_behind(tmp_path, number, status):
    folder, out = fill(tmp_path / "in", 24), tmp_path / "out.jsonl"
    words = [folder, "--output", out, "--max-tokens", 32, "--concurrency", 2]
    process = start(*words)
    try:
        wait_for_lines(out, process)
        process.send_signal(number)
        told, logged = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == status, logged
    assert group_is_gone(process.pid)
    done = out.read_bytes().count(b"\n")
    assert 5 <= done < 24
    with CaptionJournal(out.with_name("out.jsonl.journal")) as journal:
        finished = journal.count()
    # A killed run may have written what is not in the journal yet: all that is finished at once, at most one more than
    # --concurrency.
    assert done - 3 <= finished <= done
    if number != signal.SIGKILL:
        assert "the same command continues from here" in told
    again = start(*words, "--json")
    told, logged = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, logged
    summary = json.loads(told)
    assert summary["done"] + summary["skipped"] == 24
    assert summary["skipped"] == finished
    assert sorted(id_ for id_, _ in captions_in(out)) == [str(path) for path in sorted(folder.iterdir())]


@pytest.mark.slow
def test_a_disk_that_fills_ends_a_run_that_goes_on_later(tmp_path):
    folder, out = fill(tmp_path / "in", 40), tmp_path / "out-%05d.tar"
    words = [folder, "--output", out, "--max-tokens", 4]

    def small_files() -> None:  # to the process, writing beyond this is as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))

    process = start(*words, preexec_fn=small_files)
    told, logged = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, logged
    assert "vlmserve caption: error: " in logged
    assert "Traceback" not in logged
    assert "stopped" in told
    assert "the same command continues from here" in told
    again = start(*words, "--json")
    told, logged = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, logged
    assert json.loads(told)["skipped"] > 0
    assert len({id_ for id_, _ in captions_in(out)}) == len(captions_in(out)) == 40


@pytest.mark.slow
def test_servers_share_the_work_and_one_that_is_killed_is_done_without(capsys, tmp_path):
    folder, out = fill(tmp_path / "in", 24), tmp_path / "out.jsonl"
    serve = [sys.executable, "-m", "vlmserve.cli", "serve", "--port", "0", "--num-threads", "1"]
    servers = [ServerProcess(serve, tmp_path / f"run-{number}") for number in range(2)]
    try:
        words = [folder, "--output", out, "--max-tokens", "16", "--concurrency", "4", "--json"]
        for server in servers:
            words += ["--base-url", f"http://127.0.0.1:{server.port()}"]
        process = start(*words)
        wait_for_lines(out, process)
        os.killpg(servers[0].process.pid, signal.SIGKILL)
        told, logged = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, logged
        summary = json.loads(told)
        assert (summary["done"], summary["failed"]) == (24, 0)
        assert any("was left out" in note for note in summary["notes"])
        assert len(captions_in(out)) == 24
    finally:
        for server in servers:
            server.process.kill()
            server.wait()
