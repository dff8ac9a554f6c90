"""Loading goes straight to the device: no second copy in the host's memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vlmserve.commands.bench.checkpoints import TEXT_SIZES, VISION_SIZES, write_random_checkpoint
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.registry import load_model

SLACK = 160 << 20
"""Bytes of buffers, and what allocators keep."""


@pytest.fixture(scope="module")
def checkpoint(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.5 GB; on a CPU, less."""
    layers, vocabulary = (28, 151936) if device.type == "cuda" else (12, 16384)
    vision = VISION_SIZES | {"depth": 6, "deepstack_visual_indexes": [1, 3, 5]}
    text = TEXT_SIZES | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), text_sizes=text, vision_sizes=vision)


def test_memory_of_the_host_while_loading(checkpoint, device):
    load_model(checkpoint, device=device)  # what a first time allocates for good
    model, grown = watched(lambda: load_model(checkpoint, device=device))
    weights = weight_bytes(model)
    assert weights > 3 * SLACK, "or nothing would be seen"
    assert grown < (weights if device.type == "cpu" else 0) + SLACK
    assert all(parameter.device.type == device.type for parameter in model.parameters())
    again = dict(load_model(checkpoint).named_parameters())  # on the CPU
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), again[name]), name


def watched(run: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, int]:
    """What it returns, and bytes of memory beside files that the process had more meanwhile than before."""
    ended, most, before = threading.Event(), [0], _own_memory()

    def watch() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], _own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        made = run()
    finally:
        ended.set()
        watcher.join()
    return made, max(most[0], _own_memory()) - before


def _own_memory() -> int:
    status = Path("/proc/self/status").read_text()
    kinds = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)
    return sum(map(int, kinds)) * 1024
