"""What encoder workers are told when they start. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """model: a checkpoint folder. devices: "cpu", "cuda:1" ..., one worker each; one may stand there several times.

    dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own. threads: of each worker on a CPU.
    cpu_kernels: whether it uses our operators there; gpu_kernels: what it computes with on a GPU.
    rows_device: where rows are wanted, the LLM's.
    shared_dir: an existing private directory for `SharedArrays`, on tmpfs. startup_timeout_s: for loading the tower.
    ready_by: when it is over for a worker's first start, by `time.monotonic`, if it began before that start did.
    batch_timeout_s: for a batch, sent, encoded and sent back.
    """

    model: Path
    devices: tuple[str, ...]
    shared_dir: Path
    rows_device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    cpu_kernels: Literal["auto", "off"] = "auto"
    gpu_kernels: Literal["auto", "triton", "torch"] = "auto"
    log_level: str = "info"
    startup_timeout_s: float = 600.0
    ready_by: float = math.inf
    batch_timeout_s: float = 3600.0

    def may_lend(self, device: str) -> bool:
        """Whether a worker's rows may stay on its device until they are copied to where they are wanted (CUDA IPC)."""
        return device.startswith("cuda") and self.rows_device.startswith("cuda")
