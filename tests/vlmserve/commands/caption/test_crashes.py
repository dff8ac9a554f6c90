"""Whatever ends a run, and whenever: nothing finished is lost, nothing stands twice, only work under way is redone."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.vlmserve.commands.caption import runs
from tests.vlmserve.commands.caption.runs import (
    FakeCaptioner,
    caption_of,
    captions_in,
    content,
    item,
    output_settings,
    run_once,
)
from vlmserve.commands.batch.item import MediumItem
from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.opening import CaptionSettings

CONCURRENCY = 3
# The formats with a file that grows and with parts. The others write from the same journal.
OUTPUTS = ["out-%05d.tar", "out-%05d.parquet"]
OUTPUTS += [pytest.param(name, marks=pytest.mark.slow) for name in ("out.jsonl", "out.parquet", "out")]


def found() -> list[MediumItem]:
    """Some are alike, and one cannot be read."""
    items = [item(f"pictures/{number}", content(number % 17)) for number in range(23)]
    items.insert(7, item("pictures/gone"))
    return items


class Faults:
    """Counts what reaches for the disk, and does something at the one of a number, half of whose bytes are written."""

    def __init__(self, at: int, what) -> None:
        self.left = at
        self._what = what

    def hit(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._what()

    def install(self, patch) -> None:
        pwrite, fsync, replace, add, set_part = (
            os.pwrite,
            os.fsync,
            pathlib.Path.replace,
            CaptionJournal.add,
            CaptionJournal.set_part,
        )

        def torn_pwrite(fd: int, data: memoryview, offset: int) -> int:
            if self.left == 1:
                pwrite(fd, data[: len(data) // 2], offset)
            self.hit()
            return pwrite(fd, data, offset)

        def counted(function):
            def call(*args, **kwargs):
                self.hit()
                result = function(*args, **kwargs)
                self.hit()
                return result

            return call

        patch(os, "pwrite", torn_pwrite)
        patch(os, "fsync", counted(fsync))
        patch(pathlib.Path, "replace", counted(replace))
        patch(CaptionJournal, "add", counted(add))
        patch(CaptionJournal, "set_part", counted(set_part))


def run_killed(folder: Path, name: str, at: int) -> bool:
    """A run in a child that is killed at a point; whether it was, and did not end before. The child notes what it
    asked."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Faults(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).install(setattr)
            asked = os.open(folder / "asked", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            captioner = FakeCaptioner(lambda request: os.write(asked, runs.medium_of(request)[64:] + b"\n") and None)
            run_once(
                found(),
                output_settings(folder / name),
                captioner=captioner,
                settings=CaptionSettings(concurrency=CONCURRENCY),
                errors=folder / "errors.jsonl",
            )
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("name", OUTPUTS)
@hypothesis_settings(max_examples=4)
@given(kills=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_killed_at_any_point_a_run_goes_on(tmp_path_factory, name, kills):
    folder = tmp_path_factory.mktemp("run")
    killed = sum(run_killed(folder, name, at) for at in kills)
    assert not run_killed(folder, name, 10**9)
    assert_whole(folder / name)
    assert [line["id"] for line in runs.lines(folder / "errors.jsonl")] == ["pictures/gone"]
    asked = (folder / "asked").read_text().splitlines()
    # at most so many in a killed run are asked, and twice as many wait to be written
    assert len(asked) <= 17 + killed * 3 * CONCURRENCY, "what was finished is not asked again"
    assert not list(folder.glob("*.part"))


def assert_whole(output: Path) -> None:
    expected = {f"pictures/{number}": caption_of(content(number % 17)) for number in range(23)}
    assert Counter(captions_in(output)) == Counter(expected.items()), "each once, with its own caption"


@pytest.mark.parametrize("name", OUTPUTS)
@hypothesis_settings(max_examples=4)
@given(at=st.integers(1, 60))
def test_a_disk_that_fills_at_any_point_stops_the_run_and_no_more(tmp_path_factory, name, at):
    folder = tmp_path_factory.mktemp("run")
    output = output_settings(folder / name)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(at, full)
        faults.install(patch.setattr)
        failed = False
        with contextlib.suppress(OSError):
            failed = True
            run_once(found(), output)
            failed = False
    assert failed == (faults.left <= 0)
    captioner = FakeCaptioner()
    run_once(found(), output, captioner=captioner)
    assert_whole(folder / name)
    assert failed or not captioner.asked


def test_a_journal_on_a_full_disk_says_so(tmp_path):
    journal = CaptionJournal(tmp_path / "j.journal")
    journal.begin({})

    journal._db.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size if that is larger
    with pytest.raises(OSError, match="is the disk full"):
        journal.add((), (), {"much": "x" * 2**20})
    journal.close()
