"""The built-in model in a folder of its own, for servers under test and for damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from vlmserve.config.model_path import DEFAULT_MODEL


def copy_default_model(folder: Path) -> None:
    """Copy its files. It is to be computed in float32, so that no rounding decides what is answered."""
    shutil.copytree(DEFAULT_MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
