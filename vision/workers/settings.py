"""Settings of encoder workers. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Settings that a worker gets when it starts.

    `model`: a checkpoint folder. `second`: another one, whose tower's embeddings lie behind the first one's. `devices`:
    "cpu", "cuda:1" ..., one worker each; a device may appear several times. `dtype`: "float32", "bfloat16", "float16",
    or "auto" for the checkpoint's own. `threads`: of each worker on a CPU. `cpu_kernels`: whether to use our operators
    on a CPU. `gpu_kernels`: the kernels on a GPU. `cuda_graphs`: capture the layers on a GPU. `quantization`: w8a8
    rounds weights and activations on a CPU. `rows_device`: the LLM's device, which needs the rows. `shared_dir`: an
    existing private directory for `SharedArrays`, on tmpfs. `startup_timeout_s`: for loading the tower. `ready_by`: the
    `time.monotonic` at which a first start's time is over, if that is earlier. `batch_timeout_s`: for sending, encoding
    and sending back a batch. `max_lora_rank`: of adapters, which are read from their folders when a batch needs them;
    0: there are none. `max_loaded_loras`: how many may be in memory.
    """

    model: Path
    devices: tuple[str, ...]
    shared_dir: Path
    second: Path | None = None
    rows_device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    cpu_kernels: Literal["auto", "off"] = "auto"
    gpu_kernels: Literal["auto", "triton", "torch"] = "auto"
    cuda_graphs: bool = False
    quantization: str = "none"
    log_level: str = "info"
    startup_timeout_s: float = 600.0
    ready_by: float = math.inf
    batch_timeout_s: float = 3600.0
    max_lora_rank: int = 0
    max_loaded_loras: int = 1

    def may_lend(self, device: str) -> bool:
        """Return True if a worker's rows may stay on its device until they are copied to `rows_device` (CUDA IPC)."""
        return device.startswith("cuda") and self.rows_device.startswith("cuda")
