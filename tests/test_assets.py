"""The sample pictures are what their script draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ASSETS = Path(__file__).resolve().parents[1] / "assets"


@pytest.mark.parametrize("name", ["shapes.png", "receipt.png"])
def test_pictures_match_their_script(tmp_path: Path, name: str) -> None:
    subprocess.run([sys.executable, str(ASSETS / "draw.py"), str(tmp_path)], check=True)
    with Image.open(ASSETS / name) as kept, Image.open(tmp_path / name) as drawn:
        assert kept.size == drawn.size
        difference = np.asarray(kept, np.float32) - np.asarray(drawn, np.float32)
    assert np.abs(difference).mean() < 2, "the same but for another version's smoothing"
