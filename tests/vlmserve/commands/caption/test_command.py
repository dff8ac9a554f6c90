"""`vlmserve caption`: what its command line means and refuses, and the whole command with the built-in model."""

from __future__ import annotations

import io
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
from tests.vlmserve.commands.caption.runs import captions_in, item, lines, output_settings, run_once
from tests.vlmserve.commands.warmup.media import png
from tests.vlmserve.reference import picture
from tests.vlmserve.server_process import ROOT, ServerProcess
from vlmserve import LLM, SamplingOverrides, cli
from vlmserve.commands.batch.inputs.files import StandardInput
from vlmserve.commands.batch.shared_files import refuse_shared_files
from vlmserve.commands.caption.command import DEFAULT_PROMPT, named_folder, read_command, words_to_open
from vlmserve.commands.caption.feed import ItemShard
from vlmserve.commands.caption.journal import CaptionJournal, ErrorsFile
from vlmserve.config.checks import SettingsError
from vlmserve_common.installing import install


def test_what_is_left_out(monkeypatch):
    monkeypatch.delenv("VLMSERVE_MEDIA_PROCESSES", raising=False)
    command = read_command(["pictures/"])
    assert list(command.inputs) == ["pictures/"]
    assert (command.settings.engine.model, command.prompt, command.shard) == ("", DEFAULT_PROMPT, ItemShard())
    assert command.run.options == {"max_tokens": 256, "temperature": 0.0}
    assert command.settings.engine.media_processes >= 1, "scraped files are decoded apart"
    assert command.run.concurrency == command.settings.engine.max_running_requests
    assert read_command(["a", "--media-processes", "0"]).settings.engine.media_processes == 0
    monkeypatch.setenv("VLMSERVE_MEDIA_PROCESSES", "3")
    assert read_command(["a"]).settings.engine.media_processes == 3


def test_nothing_is_kept_where_nothing_comes_twice():
    engine = read_command(["pictures/"]).settings.engine
    assert (engine.disable_radix_cache, engine.processor_cache_mib) == (True, 0)
    assert read_command(["a", "--no-disable-radix-cache"]).settings.engine.disable_radix_cache is False
    for words in (["a.jsonl"], ["-", "--input-format", "jsonl"], ["a", "--num-captions", "2"]):
        engine = read_command(words).settings.engine
        assert (engine.disable_radix_cache, engine.processor_cache_mib) == (False, 128)
    for words in (["a", "--system-prompt", "Be brief."], ["a.parquet", "--prompt-column", "q"]):
        assert read_command(words).settings.engine.disable_radix_cache is False


def test_a_model_may_stand_first(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    command = read_command([str(tmp_path), "pictures/", "--fps", "2", "list.txt"])
    assert (command.settings.engine.model, list(command.inputs)) == (str(tmp_path), ["pictures/", "list.txt"])
    assert (command.run.picture_knobs, command.run.video_knobs) == ({}, {"fps": 2.0})
    assert read_command(["Qwen/Qwen3-VL-2B-Instruct", "pictures/"]).settings.engine.model == "Qwen/Qwen3-VL-2B-Instruct"
    with pytest.raises(SettingsError, match="is a model: name an INPUT, too"):
        read_command([str(tmp_path)])


def test_servers_have_the_model(tmp_path):
    command = read_command(["a/b", "c", "--base-url", "http://a:1", "--base-url", "http://b:1", "--model", "m"])
    assert list(command.inputs) == ["a/b", "c"], "nothing is taken for a model"
    assert (command.settings.engine.model, command.run.concurrency) == ("m", 32)


def test_several_captions_are_sampled_and_files_count(tmp_path):
    prompt, config = tmp_path / "p.txt", tmp_path / "my.yaml"
    prompt.write_text("Was ist das?\n")
    config.write_text("media-processes: 0\npage-size: 32\n")
    command = read_command(["a", "--prompt-file", str(prompt), "--config", str(config)])
    engine = command.settings.engine
    assert (command.prompt, engine.media_processes, engine.page_size) == ("Was ist das?", 0, 32)
    command = read_command(["a", "--num-captions", "3", "--top-p", "0.9", "--stop", "x", "--stop", "y"])
    assert command.run.options == {"max_tokens": 256, "temperature": 0.7, "top_p": 0.9, "n": 3, "stop": ["x", "y"]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--concurrency", "0"], "--concurrency is 0; it must be 1 or more, or left out"),
        (["--num-captions", "2", "--temperature", "0"], "with --temperature 0 all of them would be the same"),
        (["--shard", "4/4"], "--shard is '4/4'; it must be like 0/4, 1/4, 2/4 or 3/4"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file: give one"),
        (["--prompt-file", "/nowhere"], "--prompt-file /nowhere: cannot be read"),
        (["--api-key", "k"], "--api-key goes with --base-url"),
        (["--caption-suffix", "txt"], "--caption-suffix is 'txt'; it must be a suffix such as .txt"),
        (["--output", "out.csv"], "--output is 'out.csv'; it must end with .jsonl, .parquet or .tar"),
        (["--page-size", "0"], "--page-size is 0"),
        (["/no/such/folder"], "INPUT '/no/such/folder': No such file or directory"),
    ],
)
def test_bad_usage_says_why_and_ends_with_2(words, told, capsys, tmp_path):
    assert cli.main(["caption", str(tmp_path), *words]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_an_output_whose_package_is_missing_is_told_before_anything_is_made(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.main(["caption", str(tmp_path), "--output", str(tmp_path / "o.parquet")]) == 2
    assert f"o.parquet' needs pyarrow: {install('caption')}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_largest_picture_that_is_asked_for_is_not_narrowed_by_speed(monkeypatch):
    monkeypatch.delenv("VLMSERVE_MAX_PIXELS", raising=False)
    assert read_command(["pictures/"]).settings.engine.max_pixels == "auto"
    assert read_command(["pictures/", "--max-pixels", "5000000"]).settings.engine.max_pixels == "checkpoint"
    monkeypatch.setenv("VLMSERVE_MAX_PIXELS", "300000")
    assert read_command(["pictures/", "--max-pixels", "5000000"]).settings.engine.max_pixels == 300000


def test_captions_of_a_json_schema(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "properties": {"b": {}, "a": {}}}')
    form = read_command(["a", "--json-schema", str(file)]).run.options["response_format"]
    assert form["type"] == "json_schema"
    assert list(form["json_schema"]["schema"]["properties"]) == ["b", "a"]
    file.write_text('{"properties": {"a": {"not": {}}}}')
    with pytest.raises(SettingsError, match=r"schema\.json .*not at #/properties/a is not supported"):
        read_command(["a", "--json-schema", str(file)])
    file.write_text("{")
    with pytest.raises(SettingsError, match="cannot be read: Expecting"):
        read_command(["a", "--json-schema", str(file)])


def test_no_file_has_two_uses(tmp_path, capsys):
    """Whatever its names: of two outputs one would be lost, and an input is never written to."""
    given, other = tmp_path / "in.jsonl", tmp_path / "folder" / "other.jsonl"
    other.parent.mkdir()
    for path in (given, other):
        path.write_text('{"image": "a.png"}\n')
    os.link(given, tmp_path / "same.jsonl")
    (tmp_path / "later").symlink_to("out.jsonl")  # which is not there yet
    (tmp_path / "again").symlink_to(tmp_path)
    out, pattern, before = tmp_path / "out.jsonl", f"{tmp_path}/**/o*.jsonl", sorted(tmp_path.rglob("*"))
    for words, told in (
        ([given, "--output", out, "--errors", out], f"--output and --errors are one file, '{out}'"),
        (
            [given, "--output", out, "--errors", tmp_path / "later"],
            f"{out}' (also '{tmp_path}/later'): name another one for --errors",
        ),
        ([given, "--output", out, "--errors", tmp_path / "again" / "out.jsonl"], "--output and --errors"),
        ([given, "--output", out, "--errors", f"{out}.journal"], "--journal and --errors"),
        ([given, "--output", out, "--errors", f"{out}.journal-wal"], "--journal and --errors"),
        ([given, "--output", out, "--journal", out], "--output and --journal"),
        ([given, "--output", tmp_path / "o-%05d.tar", "--errors", tmp_path / "o-00003.tar"], "--output and --errors"),
        ([given, "--output", tmp_path / "o.tar", "--errors", tmp_path / "o-00001.tar.part"], "--output and --errors"),
        ([given, "--output", tmp_path / "o-%02d.parquet", "--errors", tmp_path / "o-02.parquet"], "--output and --err"),
        ([given, "--output", out, "--errors", given], f"INPUT and --errors are one file, '{given}'"),
        ([given, "--output", given], "INPUT and --output"),
        ([given, "--output", given, "--restart"], "INPUT and --output"),
        ([given, "--output", tmp_path / "same.jsonl", "--restart"], "INPUT and --output"),
        ([given, "--output", out, "--journal", given], "INPUT and --journal"),
        ([given.as_uri(), "--output", given], "INPUT and --output"),
        ([given, "--output", out, "--errors", other, "--json-schema", other], "--json-schema and --errors"),
        ([given, "--output", out, "--errors", other, "--prompt-file", other], "--prompt-file and --errors"),
        ([pattern, "--output", tmp_path / "again" / "folder" / "other.jsonl"], "INPUT and --output"),
        ([pattern, "--output", out], "INPUT and --output"),  # the pattern would find it later
        ([f"{tmp_path}/{{3..5}}.png", given, "--output", out, "--errors", given], "INPUT and --errors"),
    ):
        (tmp_path / "4.png").touch()
        assert cli.main(["caption", *map(str, words)]) == 2
        assert told in capsys.readouterr().err
        (tmp_path / "4.png").unlink()
        assert given.read_text() == other.read_text() == '{"image": "a.png"}\n'
        assert sorted(tmp_path.rglob("*")) == before, "nothing was opened"


def test_what_is_no_file_can_have_two_uses(tmp_path):
    refuse_shared_files([("--output", Path("/dev/null")), ("--errors", Path("/dev/null"))], [("INPUT", tmp_path)])
    refuse_shared_files([("--errors", tmp_path), ("--output", tmp_path / "a")], [("INPUT", tmp_path / "b")])


def test_no_caption_replaces_another_file_of_the_command(tmp_path, capsys):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(png(ord(name)))
    listed = tmp_path / "a.txt"
    listed.write_text("a.png\nb.png\nc.png\n")
    words = [listed, "--errors", tmp_path / "b.txt", "--journal", tmp_path / "j", "--max-tokens", "2", "--overwrite"]
    assert cli.main(["caption", *map(str, words), "--media-processes", "0"]) == 3
    assert listed.read_text() == "a.png\nb.png\nc.png\n"
    told = {Path(line["id"]).name: line["message"] for line in lines(tmp_path / "b.txt")}
    assert told.keys() == {"a.png", "b.png"}
    assert "a.txt, which is INPUT" in told["a.png"]
    assert "b.txt, which is --errors" in told["b.png"]
    assert (tmp_path / "c.txt").read_text()


def test_a_file_of_errors_replaces_nothing_else(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine\n")
    with pytest.raises(SettingsError, match=r"--errors is .*mine.txt', which holds something else"):
        ErrorsFile(mine)
    assert mine.read_text() == "mine\n"
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(target)
    run_once([item("gone")], output_settings(tmp_path / "out.jsonl"), errors=link)
    assert link.is_symlink()
    assert [line["id"] for line in lines(target)] == ["gone"]
    before = target.read_text()
    ErrorsFile(link)
    assert target.read_text() == before
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.extend(pipe.read_text().splitlines() for _ in range(2)))
    reader.start()
    run_once([item("gone")], output_settings(tmp_path / "other.jsonl"), errors=pipe)
    reader.join(30)
    assert pipe.is_fifo()


def test_captions_are_put_beside_local_files_only(tmp_path, monkeypatch):
    for word in ("http://host/a.png", "a.tar", "a.parquet", "requests.jsonl", "s3://bucket/folder", "a.tar.gz"):
        with pytest.raises(SettingsError, match="captions cannot be put beside it, name an --output"):
            words_to_open(read_command([word]))
        assert words_to_open(read_command([word, "--output", "out.jsonl"])) == [word]
    words = ["in/a.png", "in/a.txt", "in/list.txt", "in/b.mp4", "in/b.txt"]
    assert words_to_open(read_command(words)) == ["in/a.png", "in/list.txt", "in/b.mp4"], "as a shell's in/* finds them"


def test_the_folder_of_a_word(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for word, folder in (("a", "a"), ("a/x.png", "a"), ("a/**/*.png", "a"), ("*/b/*.png", ".")):
        assert named_folder(f"{tmp_path}/{word}") == tmp_path / folder


def test_standard_input_lets_go_of_who_waits_for_it():
    read_end, write_end = os.pipe()
    stdin = StandardInput(read_end)
    os.write(write_end, b"a line\nhalf")

    file = io.BufferedReader(stdin)
    assert file.readline() == b"a line\n"
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(file.readline()))
    waiter.start()
    stdin.stop()
    waiter.join(30)
    assert not waiter.is_alive()
    assert got == [b"half"]
    os.close(write_end)


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
    assert "once that is mended, the command continues from here" in told
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
