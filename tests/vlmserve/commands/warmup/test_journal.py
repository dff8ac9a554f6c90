"""The journal of a run: on disk before it says so, and read again whatever became of it."""

from __future__ import annotations

import os

from vlmserve.commands.warmup.run import WarmupJournal


def test_a_line_is_on_disk_when_it_is_added(tmp_path, monkeypatch):
    path, flushed = tmp_path / "done.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(path.read_text()))
    journal = WarmupJournal(path, "settings")
    journal.add("identity", [b"key"], source="a.png")
    assert flushed == [path.read_text()]
    assert flushed[0].endswith("\n")
    journal.close()


def test_what_is_read_again(tmp_path):
    path = tmp_path / "done.jsonl"
    first = WarmupJournal(path, "settings")
    first.add("one", [b"a", b"b"], source="1.png")
    first.add("two", [], source="2.png")
    first.close()
    with path.open("ab") as file:
        file.write(
            b'[1]\n{"settings": "settings"}\n\xff\xfe\n{"settings": "settings", "identity": "three", "keys": ["6'
        )
    again = WarmupJournal(path, "settings")
    assert again.finished("one") == (b"a", b"b")
    assert again.finished("two") == ()
    assert again.finished("three") is None
    again.add("four", [b"c"], source="4.png")
    again.close()
    last = WarmupJournal(path, "settings")
    assert (last.finished("one"), last.finished("four")) == ((b"a", b"b"), (b"c",))
    last.close()
    other = WarmupJournal(path, "other settings")
    assert other.finished("one") is None
    other.close()
