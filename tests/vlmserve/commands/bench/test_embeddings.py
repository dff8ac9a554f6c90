"""`vlmserve bench embeddings`: its figures, over both engines and a server of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.vlmserve.pooled_checkpoints import make_embedder
from vlmserve import cli
from vlmserve.commands.bench.embeddings import close
from vlmserve_common.errors import EngineError


def test_both_engines_make_the_same_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = make_embedder(tmp_path / "model"), tmp_path / "figures.json"
    words = ["bench", "embeddings", "--model", str(model), "--rounds", "1", "--threads", "1", "--json", str(file)]
    words += ["--texts", "5", "--tokens", "6", "--pictures", "3", "--side", "64", "--batch", "2", "--body", "2"]
    assert cli.main(words) == 0
    parts = json.loads(file.read_text())["measures"]
    assert {part: len(measures) for part, measures in parts.items()} == {"texts": 3, "pictures": 5, "api": 3}
    assert all(one["spread"]["median"] > 0 for measures in parts.values() for one in measures)
    assert "target: at least 20 x" in capsys.readouterr().out


def test_other_vectors_are_no_figures() -> None:
    rows = np.eye(3, dtype=np.float32)
    close(rows, rows)
    with pytest.raises(EngineError, match="cosine distance 1"):
        close(rows, rows[[0, 2, 1]])
