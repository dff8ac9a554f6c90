"""Inputs, outputs and other files that must not be the same; files of somebody else."""

from __future__ import annotations

import io
import os
import threading

import pytest

from tests.vlmserve.commands.caption.runs import item, lines, output_settings, run_once
from tests.vlmserve.commands.warmup.media import root_logger_kept
from vlmserve import cli
from vlmserve.commands.batch.inputs.files import StandardInput
from vlmserve.commands.caption.command import named_folder, read_command, words_to_open
from vlmserve.commands.caption.journal import ErrorsFile
from vlmserve.config.checks import SettingsError


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
        with root_logger_kept():
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
