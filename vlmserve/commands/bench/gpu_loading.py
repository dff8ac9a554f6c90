"""How long a fresh process takes from its start until its engine is ready, with weights in the page cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from vlmserve.commands.bench.random_checkpoint import published_tensors, save_weights
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError

_START = """
import sys
from vlmserve import LLM
model, device, dtype = sys.argv[1:]
with LLM(model, device=device, dtype=dtype, max_total_tokens=16384, max_model_len=4096, max_running_requests=16) as llm:
    print(llm.info)
"""
_TIMEOUT_S = 240.0


def seconds_until_ready(
    model: VisionLanguageModel, folder: Path, *, device: torch.device, dtype: torch.dtype
) -> tuple[float, int]:
    """Write the weights beside a copy of the folder's settings, and start an engine on them twice: the first time
    builds what is built once. Returns the second's seconds, and the weights' bytes. EngineError where none starts."""
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        for file in folder.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copyfile(file, Path(made) / file.name)
        save_weights(Path(made), published_tensors(model))
        command = [sys.executable, "-c", _START, made, str(device), dtype_name(dtype)]
        for _ in range(2):
            before = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            taken = time.perf_counter() - before
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise EngineError(f"the process that was to load the weights ended with {done.returncode}: {last}")
        return taken, weight_bytes(model)
