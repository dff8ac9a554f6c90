"""The command line: what is read from it, what is told about a wrong one, and files that must not be the same."""

from __future__ import annotations

import io
import os
import threading

import pytest

from tests.vlmserve.commands.caption.runs import item, lines, output_settings, run_once
from vlmserve import cli
from vlmserve.commands.batch.inputs.files import StandardInput
from vlmserve.commands.caption.command import DEFAULT_PROMPT, named_folder, read_command, words_to_open
from vlmserve.commands.caption.feed import ItemShard
from vlmserve.commands.caption.journal import ErrorsFile
from vlmserve.config.checks import SettingsError


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


def test_an_input_is_never_written_to(tmp_path, capsys):
    given = tmp_path / "in.jsonl"
    given.write_text('{"image": "a.png"}\n')
    os.link(given, tmp_path / "same.jsonl")
    for words in (
        ["--output", tmp_path / "out.jsonl", "--errors", given],
        ["--output", given],
        ["--output", given, "--restart"],
        ["--output", tmp_path / "same.jsonl", "--restart"],
        ["--output", tmp_path / "out.jsonl", "--journal", given],
    ):
        assert cli.main(["caption", *map(str, [given, *words])]) == 2
        assert "is an INPUT, and would be written to" in capsys.readouterr().err
        assert given.read_text() == '{"image": "a.png"}\n'
        assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "same.jsonl"}


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
