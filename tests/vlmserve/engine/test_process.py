"""What the scheduler process makes of the settings that it is started with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.default_model import copy_default_model
from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Rig
from vision.workers import process_backend
from vision.workers.settings import WorkerSettings
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.engine import process
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.messages import EncodeReqInput, RequestsLost


class StartedError(Exception):
    """Says what processes would be started with."""


def test_encoder_processes_start_as_the_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(settings: WorkerSettings) -> None:
        raise StartedError(settings.log_level, settings.startup_timeout_s, settings.ready_by, settings.shared_dir)

    monkeypatch.setattr(process_backend, "ProcessBackend", told)
    monkeypatch.setattr(process, "Sender", lambda *_: SimpleNamespace(send=None))
    copy_default_model(tmp_path)
    args = EngineArgs(model=str(tmp_path), num_threads=1, max_total_tokens=1024, encoder_dp_size=1)
    channels = Channels.in_directories(tmp_path, tmp_path / "shared")
    start = StartSettings(shared_dir=tmp_path / "shared", log_level="error", startup_timeout_s=7.5, ready_by=12.5)
    with pytest.raises(StartedError) as caught:
        process.run_scheduler(args, channels, start, pytest.fail)
    assert caught.value.args == ("error", 7.5, 12.5, tmp_path / "shared")


def test_a_lost_message_ends_its_requests_and_is_told_on() -> None:
    rig, sent = Rig(), []
    dispatch = process.message_dispatcher(rig.loop, sent.append)
    dispatch(request("a", [1] * 6))
    lost = RequestsLost(rids=("a", "never came"), message="unreadable")
    dispatch(lost)
    assert sent == [lost]
    assert rig.finish["a"].type == "abort"


def test_figures_of_groups_have_what_is_of_no_group() -> None:
    rig = Rig(groups=2)
    media = request("", [0] * 4, [(1, 2, b"seen")]).mm_inputs
    assert media is not None
    rig.loop.handle(EncodeReqInput(rid="w", items=tuple(media.items)))
    stats = rig.loop.stats()
    assert (stats.num_warmups, [group.num_warmups for group in stats.replicas]) == (1, [1, 0])
