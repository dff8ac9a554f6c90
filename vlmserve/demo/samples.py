"""The sample pictures and clips, with questions that the default model answers right."""

from __future__ import annotations

import json
from pathlib import Path

from vlmserve.demo.conversation import Question

FOLDER = (Path(__file__).parent / "samples").resolve()
"""They come with the package."""


def load_samples(folder: Path = FOLDER) -> tuple[Question, ...]:
    """Those questions that are answered. Raises OSError where the files are not."""
    samples = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    return tuple(
        Question(text=sample["question"], files=tuple(folder / name for name in sample["media"]))
        for sample in samples
        if sample["answered"]
    )
