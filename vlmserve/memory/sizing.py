"""How many KV slots fit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from vlmserve.common.errors import EngineError
from vlmserve.engine_args import EngineArgs

_GIB = 1024**3


def available_host_memory() -> int:
    """Bytes this process may still take: the system's available memory, or a smaller limit of its cgroup."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
                if line.startswith("inactive_file "):  # files just read, such as the weights: given back on demand
                    used -= int(line.split()[1])
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # not Linux, or no cgroup v2: the first figure stands
    return available


def kv_cache_size(args: EngineArgs, *, bytes_per_token: int, max_model_len: int, device: torch.device) -> int:
    """KV slots, a multiple of the page size: `max_total_tokens` if set, else what memory allows, and never more than
    `max_running_requests` full contexts. Call it when the weights are loaded. EngineError if not even a page fits."""
    size = args.page_size
    if args.max_total_tokens is not None:
        tokens = args.max_total_tokens
    else:
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            budget = free - total * (1 - args.mem_fraction_static)
        else:
            budget = min(available_host_memory() * args.mem_fraction_static, args.cpu_kv_cache_gib * _GIB)
        tokens = min(int(budget) // bytes_per_token, args.max_running_requests * (max_model_len + size))
    tokens = tokens // size * size
    if tokens < 2 * size:
        raise EngineError(
            f"there is room for {tokens} KV slots of {bytes_per_token} bytes, and at least {2 * size} are needed "
            "(settings: --mem-fraction-static, --cpu-kv-cache-gib, --max-total-tokens)"
        )
    return tokens
