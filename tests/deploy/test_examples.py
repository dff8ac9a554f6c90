"""The examples in deploy/ say what the code says: files, settings and limits."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.vlmserve.server_process import ROOT
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ENV_PREFIX, ServerSettings, iter_settings, load_settings

DEPLOY = ROOT / "deploy"


def _settings_in(name: str) -> dict[str, str]:
    """Our variables that a file sets or has commented out."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    return dict(re.findall(rf"^#?\s*({ENV_PREFIX}\w+)=(.*)$", text, re.MULTILINE))


def test_what_the_image_is_made_of_exists_and_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copies = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    copied = {source for sources in copies for source in sources}
    assert copied == sent
    assert all((ROOT / source).exists() for source in copied)
    # what the package links to elsewhere in the repository must be there, too
    links = {path.resolve().relative_to(ROOT) for path in (ROOT / "vlmserve").rglob("*") if path.is_symlink()}
    assert links <= {Path(source) for source in copied}


def test_variables_of_the_image_are_settings() -> None:
    known = {ENV_PREFIX + setting.name.upper() for setting in iter_settings()}
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(rf"\b{ENV_PREFIX}\w+", dockerfile)) <= known


def test_the_service_starts_with_its_example_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = _settings_in("vlmserve.env")
    assert len(values) > 10
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLMSERVE_FILE_STORE_DIR", str(tmp_path))
    settings = load_settings({})
    assert settings.engine.model == values["VLMSERVE_MODEL"]
    known = {ENV_PREFIX + setting.name.upper() for setting in iter_settings()}
    assert set(values) <= known


def test_the_service_waits_longer_than_running_answers_get() -> None:
    text = (DEPLOY / "vlmserve.service").read_text(encoding="utf-8")
    found = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= _defaults().shutdown_timeout_s + 10


def test_nginx_takes_a_little_more_than_the_server() -> None:
    """So that what is too large is refused in the server's words."""
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    requests, uploads = (int(size) * 2**20 for size in re.findall(r"client_max_body_size (\d+)m;", text))
    settings = _defaults()
    assert settings.max_body_mib * 2**20 < requests <= settings.max_body_mib * 2**20 + 2**20
    assert settings.max_file_bytes < uploads <= settings.max_file_bytes + 2**20


def _defaults() -> ServerSettings:
    return ServerSettings(engine=EngineArgs(model=""))
