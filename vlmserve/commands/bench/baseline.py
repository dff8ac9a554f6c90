"""The reference to beat: a loop of `transformers` generate calls over the same questions, one at a time.

Runs in a process of its own (`python -m vlmserve.commands.bench.baseline`), so that its memory is its own. Decoding and
resizing pictures is not counted against it: its inputs are ready before the clock starts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vlmserve.commands.bench.processes import process_memory
from vlmserve.commands.bench.questions import make_questions
from vlmserve.commands.bench.reference import Reference, load_reference


def run_baseline(model_path: Path, plan: dict[str, int]) -> dict[str, Any]:
    """plan: count, side and seed of `make_questions`, output_tokens, num_threads. Returns timings, seconds, bytes."""
    from transformers.generation.streamers import BaseStreamer

    class FirstToken(BaseStreamer):
        calls = 0
        at = 0.0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 2:  # the first call brings the prompt
                self.at = time.perf_counter()

        def end(self) -> None:
            pass

    torch.set_num_threads(plan["num_threads"])
    reference = Reference(model_path, load_reference(model_path, dtype="auto"), device=torch.device("cpu"))
    questions = make_questions(plan["count"], side=plan["side"], seed=plan["seed"])
    timings = []
    inputs = [reference.prepare(question) for question in questions]
    began = time.perf_counter()
    for prepared in inputs:
        streamer, started = FirstToken(), time.perf_counter()
        [ids] = reference.generate(prepared, plan["output_tokens"], streamer=streamer)
        seconds = {"ttft_s": streamer.at - started, "total_s": time.perf_counter() - started}
        timings.append({**seconds, "tokens": len(ids), "text": reference.tokenizer.decode(ids)})
    return {
        "timings": timings,
        "wall_s": time.perf_counter() - began,
        "peak_bytes": process_memory(os.getpid(), "VmHWM"),
    }


if __name__ == "__main__":
    print(json.dumps(run_baseline(Path(sys.argv[1]), json.loads(sys.argv[2]))))
