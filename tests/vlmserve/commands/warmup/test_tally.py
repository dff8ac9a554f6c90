"""What a run shows of itself, and tells at its end."""

from __future__ import annotations

import io

from processors.inputs import Modality
from vlmserve.commands.batch.progress import Progress
from vlmserve.commands.warmup.tally import Tally
from vlmserve.ipc.messages import EncodedItem


def test_the_line_of_a_run_counts_patches():
    now, tally = [0.0], Tally(total=4, counted=True)
    progress = Progress("warmup", tally, io.StringIO(), clock=lambda: now[0])
    for now[0] in (5.0, 10.0):
        tally.add([EncodedItem(modality=Modality.VIDEO, temporal_patches=3, encoded=2, patches_encoded=100)])
    assert progress.line() == "2/4, 0.2 items/s, 20 patches/s, ETA 0:10, 2 cache hits, 0 failures"


def test_a_summary_tells_what_there_was():
    tally = Tally(total=5, done=2, skipped=1, failed=2, encoded=7, found=4, patches_encoded=900)
    assert tally.describe(2.04) == (
        "2 of 5 done in 2.0 s, 1 finished before, 2 failed; temporal patches: 7 encoded (900 vision patches), 4 found"
    )
