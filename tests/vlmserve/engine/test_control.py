"""What control does to an engine, between steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.vlmserve.api.fake_engine import FakeWeights, make_stats
from vlmserve.engine.control import EngineControl
from vlmserve.engine.profiling import Profiler
from vlmserve.ipc.control_messages import (
    AbortRequestsReq,
    ContinueReq,
    ControlRefused,
    FlushCacheReq,
    GetServerInfoReq,
    PauseReq,
    StartProfileReq,
    StopProfileReq,
)


class FakeEngine:
    def __init__(self) -> None:
        self.steps = 0
        self.busy = True
        self.running = 2
        self.aborted: list[str] = []
        self.drained = False

    def handle(self, message) -> None:
        self.aborted.append(message.rid)
        self.running -= 1

    def drain(self) -> None:
        self.drained = True

    def step(self) -> bool:
        self.steps += 1
        return self.busy

    def stats(self):
        return make_stats(num_running_reqs=self.running, num_waiting_reqs=3)

    def flush_cache(self) -> int:
        return 48


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def control(engine: FakeEngine) -> EngineControl:
    return EngineControl(engine, Profiler(clock=lambda: 5.0), FakeWeights(), device="cpu", dtype="float32")


def refusal(result: object, status: int = 409) -> str:
    assert isinstance(result, ControlRefused), result
    assert result.status == status
    return result.message


def test_paused_there_are_no_steps(engine: FakeEngine, control: EngineControl) -> None:
    assert control.step()
    paused = control.handle(PauseReq())
    assert (paused.paused, paused.num_running_reqs, paused.num_waiting_reqs) == (True, 2, 3)
    assert not control.step()
    assert (engine.steps, engine.drained) == (1, True), "what was in flight has come"
    assert refusal(control.handle(PauseReq())) == "generation is paused already"
    assert control.handle(GetServerInfoReq()).paused
    assert not control.handle(ContinueReq()).paused
    assert control.step()
    assert engine.steps == 2
    assert refusal(control.handle(ContinueReq())) == "generation is not paused"


def test_requests_end_while_paused(engine: FakeEngine, control: EngineControl) -> None:
    control.handle(PauseReq())
    assert control.handle(AbortRequestsReq(rids=("a-0", "a-1"))).num_running_reqs == 0
    assert engine.aborted == ["a-0", "a-1"]


def test_flushing_tells_how_much_and_who_is_there(control: EngineControl) -> None:
    result = control.handle(FlushCacheReq())
    assert (result.flushed, result.num_running_reqs, result.num_waiting_reqs) == (48, 2, 3)


def test_what_fails_is_told(engine: FakeEngine, control: EngineControl) -> None:
    engine.flush_cache = lambda: 1 // 0  # type: ignore[method-assign]
    assert "ZeroDivisionError" in refusal(control.handle(FlushCacheReq()), 500)
    assert control.handle(PauseReq()).paused


def test_a_profile_ends_after_its_steps(engine: FakeEngine, control: EngineControl, tmp_path: Path) -> None:
    assert refusal(control.handle(StopProfileReq())) == "no profile is being recorded"
    path = Path(control.handle(StartProfileReq(folder=str(tmp_path), steps=2, activities=("CPU",))).path)
    assert "already (0 steps so far)" in refusal(control.handle(StartProfileReq(folder=str(tmp_path))))
    assert control.handle(GetServerInfoReq()).profiling
    control.step()
    engine.busy = False
    control.step()  # nothing was computed: it does not count
    assert control.handle(GetServerInfoReq()).profiling
    engine.busy = True
    control.step()
    assert not control.handle(GetServerInfoReq()).profiling
    assert [path] == list(tmp_path.iterdir())
    assert "traceEvents" in json.loads(gzip.decompress(path.read_bytes()))


def test_a_profile_ends_when_it_is_told_to(control: EngineControl, tmp_path: Path) -> None:
    started = control.handle(StartProfileReq(folder=str(tmp_path)))
    control.step()
    stopped = control.handle(StopProfileReq())
    assert (stopped.path, stopped.steps) == (started.path, 1)
    assert gzip.decompress(Path(stopped.path).read_bytes())


def test_a_profile_that_cannot_begin(control: EngineControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = StartProfileReq(folder=str(tmp_path / "missing"))
    assert "cannot be written to" in refusal(control.handle(missing))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu = StartProfileReq(folder=str(tmp_path), activities=("GPU",))
    assert refusal(control.handle(gpu)) == "there is no GPU here to profile"
    assert list(tmp_path.iterdir()) == []
    assert not control.handle(GetServerInfoReq()).profiling
