"""Checkpoints that are changed, as they may be published or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny_checkpoints import write_safetensors


def edit_config(folder: Path, change: dict[str, Any] | Callable[[dict[str, Any]], object], section: str = "") -> None:
    """Change a configuration, or a section of it: by a function, or these fields; None removes one at the top."""
    config = json.loads((folder / "config.json").read_text())
    part = config[section] if section else config
    part.update(change) if isinstance(change, dict) else change(part)
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let `change` edit the dictionary of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write_safetensors(folder, tensors)
