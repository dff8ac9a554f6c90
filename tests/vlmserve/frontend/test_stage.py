"""What settings say to media processes, which have fake insides here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from processors.families.base import MultimodalProcessor
from processors.pool import process_maker
from processors.pool.process_maker import ProcessMaker, ProcessSettings
from tests.default_model import copy_default_model
from tests.processors.fake_media_worker import PAUSE, fake_worker
from tests.vlmserve.server_process import PATIENCE_S
from vlmserve.api.app import make_frontend
from vlmserve.commands.warmup.local import LocalTarget
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend import stage
from vlmserve.frontend.chat_messages import ImageRef, VideoRef
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base
from vlmserve_common.errors import BadRequestError


@pytest.fixture
def folder() -> Iterator[Path]:
    """On tmpfs; holds a model, and what the workers note down."""
    with PrivateDirectory(shared_memory_base(), "vlmserve-test") as private:
        (private.path / "shared").mkdir()
        copy_default_model(private.path)
        yield private.path


@pytest.fixture
def settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    def make(processor: MultimodalProcessor, given: ProcessSettings) -> ProcessMaker:
        return ProcessMaker(processor, replace(given, video_grace_s=0.0), main=fake_worker)

    monkeypatch.setattr(process_maker, "ProcessMaker", make)
    return ServerSettings(engine=EngineArgs(model=str(folder), media_processes=1))


@pytest.mark.parametrize(
    ("limit", "ref"),
    [
        ("max_image_decode_s", ImageRef(source=PAUSE, param="here")),
        ("max_video_decode_s", VideoRef(source=PAUSE, param="here")),
    ],
)
def test_the_time_that_a_medium_may_take(settings: ServerSettings, folder: Path, limit: str, ref: Any) -> None:
    times = {"max_image_decode_s": PATIENCE_S, "max_video_decode_s": PATIENCE_S, limit: 0.25}
    settings = replace(settings, **times)
    media = stage.make_request_media(
        settings.engine,
        stage.stage_limits(settings),
        max_model_len=100,
        start=start_settings(settings, folder),
    )
    try:
        with pytest.raises(BadRequestError, match=rf"0\.25 s, the limit \(setting --{limit.replace('_', '-')}\)"):
            asyncio.run(media.load([ref]))
    finally:
        asyncio.run(media.close())


def start_settings(settings: ServerSettings, folder: Path) -> StartSettings:
    return StartSettings(
        shared_dir=folder / "shared", log_level=settings.log_level, startup_timeout_s=settings.startup_timeout_s
    )


def serve(settings: ServerSettings, folder: Path) -> None:
    """Start the API process's half of a server."""
    make_frontend(
        settings, max_model_len=100, model_name="tiny", send=lambda _: None, start=start_settings(settings, folder)
    )


def warm_up(settings: ServerSettings, folder: Path) -> None:
    """Start what `vlmserve warmup` encodes with."""
    LocalTarget(settings, pin=False)


class StartedError(Exception):
    """Says what processes would be started with."""


@pytest.mark.parametrize(
    ("given", "allowed"), [(None, True), ("other.example,127.0.0.1", True), ("other.example,.example", False)]
)
def test_hosts_that_media_may_come_from(settings: ServerSettings, given: str | None, allowed: bool) -> None:
    settings = replace(settings, allow_private_media=True, allowed_media_domains=given)
    settings = replace(settings, engine=replace(settings.engine, media_processes=0))
    media = stage.make_request_media(settings.engine, stage.stage_limits(settings), max_model_len=100)
    why = "cannot fetch from" if allowed else "which is not in"
    try:
        with pytest.raises(BadRequestError, match=why):
            asyncio.run(media.load([ImageRef(source="http://127.0.0.1:9/a.png", param="here")]))
    finally:
        asyncio.run(media.close())


@pytest.mark.parametrize("start", [serve, warm_up])
def test_log_level_and_startup_timeout_are_theirs_too(
    settings: ServerSettings,
    folder: Path,
    start: Callable[[ServerSettings, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(_: object, given: ProcessSettings) -> None:
        raise StartedError(given.log_level, given.startup_timeout_s)

    monkeypatch.setattr(process_maker, "ProcessMaker", told)
    with pytest.raises(StartedError) as caught:
        start(replace(settings, log_level="error", startup_timeout_s=7.5), folder)
    assert caught.value.args == ("error", 7.5)
