"""Models of a hub: a fake one, of which a few revisions are on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmserve import LLM
from vlmserve.config.model_path import NotDownloadedError, resolve_model
from vlmserve_common.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of revision v1 of org/tiny, which has a branch main that is not here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    own = tmp_path / "models--org--tiny"
    folder = own / "snapshots" / COMMIT
    for made in (folder, own / "refs"):
        made.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "unknown_one"}')
    (own / "refs" / "v1").write_text(COMMIT)
    return folder


def test_a_revision(snapshot: Path) -> None:
    assert resolve_model("org/tiny", "v1").samefile(snapshot)
    assert resolve_model("org/tiny", COMMIT, download=False).samefile(snapshot)
    for other in (None, "v2"):
        with pytest.raises(CheckpointError, match="cannot be had from the Hugging Face hub"):
            resolve_model("org/tiny", other)
    with pytest.raises(NotDownloadedError):
        resolve_model("org/tiny", "v2", download=False)
    assert resolve_model(str(snapshot), "v2").samefile(snapshot), "a folder has none"


def test_the_setting_chooses_it(snapshot: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be had"):
        LLM("org/tiny")
    with pytest.raises(CheckpointError, match="unknown_one"):
        LLM("org/tiny", revision="v1")
