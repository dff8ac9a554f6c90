"""The sample media are what their script draws, and each has a question."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

ASSETS = Path(__file__).resolve().parents[1] / "assets"
SAMPLES = ASSETS / "samples"
MEDIA = sorted(path.name for path in SAMPLES.iterdir() if path.suffix != ".json")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    subprocess.run([sys.executable, str(ASSETS / "draw.py"), str(folder)], check=True)
    return folder


def _frames(path: Path) -> np.ndarray:
    if path.suffix == ".mp4":
        with av.open(str(path)) as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.mark.parametrize("name", MEDIA)
def test_media_match_their_script(drawn: Path, name: str) -> None:
    kept, made = (_frames(folder / name).astype(np.float32) for folder in (SAMPLES, drawn))
    assert kept.shape == made.shape
    assert np.abs(kept - made).mean() < 2, "the same but for another version's smoothing"


def test_every_medium_has_a_question_but_the_one_for_larger_models() -> None:
    samples = json.loads((SAMPLES / "samples.json").read_text(encoding="utf-8"))
    asked = {name for sample in samples for name in sample["media"]}
    assert asked == set(MEDIA) - {"receipt.png"}
    assert all(sample["question"] and sample["answer"] for sample in samples)
