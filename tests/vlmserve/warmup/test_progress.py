"""What a run shows of itself, on a terminal and elsewhere."""

from __future__ import annotations

import io

from processors.inputs import Modality
from vlmserve.messages import EncodedItem
from vlmserve.warmup.progress import Progress, Tally, describe


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def advance(out: io.StringIO, *times: float) -> Progress:
    """Show a tally at these seconds, one source more each time."""
    now, tally = [0.0], Tally(total=4)
    progress = Progress(tally, out, clock=lambda: now[0])
    for time in times:
        now[0] = time
        tally.add([EncodedItem(modality=Modality.VIDEO, temporal_patches=3, encoded=2, patches_encoded=100)])
        progress.show()
    return progress


def test_elsewhere_a_line_every_few_seconds():
    out = io.StringIO()
    progress = advance(out, 1.0, 5.0, 6.0, 10.0)
    progress.finish()
    assert out.getvalue().splitlines() == [
        "warmup: 2/4, 0.4 items/s, 40 patches/s, 2 hits, 0 errors",
        "warmup: 4/4, 0.4 items/s, 40 patches/s, 4 hits, 0 errors",
    ]
    assert progress.seconds == 10.0


def test_a_terminals_line_is_written_over_and_wiped():
    out = Screen()
    advance(out, 0.05, 0.1, 0.15, 10.0).finish()
    _, first, last, wiped, rest = out.getvalue().split("\r")
    assert first == "2/4, 20.0 items/s, 2000 patches/s, 2 hits, 0 errors"
    assert last.rstrip() == "4/4, 0.4 items/s, 40 patches/s, 4 hits, 0 errors"
    assert len(last) == len(first), "nothing of the longer one is left"
    assert wiped.strip() == rest == ""


def test_a_summary_tells_what_there_was():
    tally = Tally(total=5, done=2, skipped=1, failed=2, ignored=3, encoded=7, found=4, patches_encoded=900)
    assert describe(tally, 2.04) == (
        "2 of 5 done in 2.0 s, 1 finished before, 2 failed; temporal patches: 7 encoded (900 vision patches), 4 found; "
        "files that are neither pictures nor videos: 3"
    )
