"""The display during a run, and the summary at its end."""

from __future__ import annotations

import io

from processors.inputs import Modality
from vlmserve.commands.batch.progress import RunProgress
from vlmserve.commands.caption.result import CaptionTally
from vlmserve.commands.warmup.run import WarmupTally
from vlmserve.ipc.messages import EncodedItem


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rates_and_time_left():
    clock, tally = Clock(), CaptionTally()
    with RunProgress("caption", tally, io.StringIO(), clock) as progress:
        clock.now = 10.0
        tally.total, tally.counted = 1000, True
        tally.done, tally.reused, tally.failed, tally.skipped, tally.completion_tokens = 90, 8, 2, 100, 450
        assert progress.line() == (
            "200/1000, 10.0 items/s, 45 tokens/s, ETA 1:20, 8 cache hits, 2 failures, 100 finished before"
        )


def test_rates_are_of_the_last_minute():
    clock, tally, out = Clock(), CaptionTally(total=10_000, counted=True), io.StringIO()
    with RunProgress("caption", tally, out, clock) as progress:
        for second in range(0, 600, 10):
            clock.now, tally.done = float(second), second  # 1 item a second
            progress.show()
        for second in range(600, 700, 10):
            clock.now, tally.done = float(second), 600 + 5 * (second - 600)
            progress.show()
        assert ", 5.0 items/s" in progress.line()
    assert out.getvalue().count("caption: ") == 69, "a line in ten seconds"


def test_without_a_count_there_is_no_time_left():
    tally = CaptionTally(done=3)
    assert RunProgress("caption", tally, io.StringIO(), Clock()).line().startswith("3/?, ")
    tally.total = 500
    line = RunProgress("caption", tally, io.StringIO(), Clock()).line()
    assert line.startswith("3/500+, ")
    assert "ETA" not in line


def test_a_terminal_shows_a_bar_and_is_left_clean():
    clock, tally, out = Clock(), CaptionTally(total=10, counted=True), Terminal()
    with RunProgress("caption", tally, out, clock) as progress:
        clock.now, tally.done = 5.0, 5
        progress.show()
        assert "5/10, 1.0 items/s" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in out.getvalue()[-20:], "the cursor is back"


def test_the_summary():
    tally = CaptionTally(done=7, reused=2, skipped=3, failed=1, completion_tokens=50)
    assert tally.describe(3.0, ended="finished") == (
        "finished: 9 captioned in 3.0 s (3.0 items/s, 50 tokens), 2 of them the same as others, 3 finished before, "
        "1 failed"
    )
    told = tally.summary(3.0, ["a note"], ended="interrupted")
    assert (told["done"], told["ended"], told["notes"]) == (7, "interrupted", ["a note"])


def test_a_warmup_counts_patches():
    clock, tally = Clock(), WarmupTally(total=4, counted=True)
    progress = RunProgress("warmup", tally, io.StringIO(), clock)
    for clock.now in (5.0, 10.0):
        tally.add([EncodedItem(modality=Modality.VIDEO, temporal_patches=3, encoded=2, patches_encoded=100)])
    assert progress.line() == "2/4, 0.2 items/s, 20 patches/s, ETA 0:10, 2 cache hits, 0 failures"
    tally = WarmupTally(total=5, done=2, skipped=1, failed=2, encoded=7, found=4, patches_encoded=900)
    assert tally.describe(2.04) == (
        "2 of 5 done in 2.0 s, 1 finished before, 2 failed; temporal patches: 7 encoded (900 vision patches), 4 found"
    )
