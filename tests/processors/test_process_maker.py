"""Media in worker processes that live and die: the same results as in threads, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from processors.families.base import ImageKnobs
from processors.fetch.fetching import FetchSettings, MediaFetcher
from processors.pool import process_maker, worker
from processors.pool.maker import FatalMediumError
from processors.pool.messages import ANSWER_MESSAGES, WORK_MESSAGES, PictureWork, WorkBegun
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pool.process_maker import ProcessMaker, ProcessSettings, TimeLimit, WorkerMain
from processors.pool.process_threads import ProcessThreads
from processors.pool.requests import ImageRequest, VideoRequest
from processors.pool.worker_start import start_worker
from processors.video.options import VideoKnobs
from tests.processors.clips import jpeg, make_clip
from tests.processors.fake_media_worker import CRASH, EARLY, EXIT, FAIL, LIE, PAUSE, fake_worker
from tests.processors.helpers import BlockingPool, encoded, picture, tiny_processor
from tests.vlmserve.server_process import PATIENCE_S, gone
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base
from vlmserve.server.errors import describe
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.child import STOP_PATIENCE_S
from vlmserve_common.transport.channel import MessageChannel
from vlmserve_common.transport.shm import MAPPED_FROM_BYTES, SharedArrays
from vlmserve_common.transport.shm_block import block_of
from vlmserve_common.transport.wire import SHARED_FROM_BYTES

GOOD = encoded(picture(60, 60))


class Fakes:
    """A pool over worker processes, of the real kind or of that which can be told to die."""

    def __init__(self, main: WorkerMain, *, plan: str = "ok", count: int = 1, **more: object) -> None:
        self._private = PrivateDirectory(shared_memory_base(), "vlmserve-test")
        self.folder = folder = self._private.path
        self.shared_dir = folder / "shared"
        self.shared_dir.mkdir()
        (folder / "plan").write_text(plan)
        self.processor = tiny_processor(folder, "qwen3_vl", max_pixels=10**6)
        patience = TimeLimit(seconds=PATIENCE_S, setting="--patience")
        given = {"first_pause_s": 0.01, "picture_time": patience, "video_time": patience, **more}
        self.maker = ProcessMaker(
            self.processor, ProcessSettings(count=count, shared_dir=self.shared_dir, **given), main
        )
        self.pool = self.make_pool(self.maker)

    def make_pool(self, maker: ProcessMaker | None = None, **more: int) -> BlockingPool:
        fetcher = MediaFetcher(FetchSettings())
        threads = None if maker is None else ProcessThreads(maker, 4)
        return BlockingPool(ProcessorPool(self.processor, fetcher, PoolSettings(max_workers=4, **more), threads))

    def notes(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def pids(self) -> list[int]:
        return [int(line) for line in self.notes("pids")]

    def load(self, data: bytes) -> object:
        return self.pool.load(ImageRequest(source=data, param="here"))[0]

    def check_works(self) -> None:
        assert bytes(self.maker.picture(GOOD, ImageKnobs()).feature[0, : len(GOOD)]) == GOOD

    def finish(self) -> None:
        self.pool.close()
        assert all(gone(pid) for pid in self.pids())
        del self.pool  # and its cache
        gc.collect()
        left = list(self.shared_dir.iterdir())
        self._private.close()
        assert left == []


def fds() -> set[str]:
    return {f"{fd.name} {os.readlink(fd)}" for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


@pytest.fixture
def fakes() -> Iterator[object]:
    """Makes one; afterwards nothing of it may be left."""
    made: list[Fakes] = []
    resource_tracker.ensure_running()
    before, threads = fds(), set(threading.enumerate())

    def make(**settings: object) -> Fakes:
        made.append(Fakes(fake_worker, **settings))
        return made[-1]

    yield make
    for one in made:
        one.finish()
    assert not [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("media-")]
    assert fds() <= before  # others' may be closed meanwhile


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[BlockingPool, BlockingPool]]:
    """(threads, two processes): pools without caches."""
    one = Fakes(start_worker, count=2)
    threads, processes = one.make_pool(cache_mib=0), one.make_pool(one.maker, cache_mib=0)
    yield threads, processes
    threads.close()
    processes.close()
    one.finish()


def outcome(pool: BlockingPool, request: object) -> object:
    """All that can be said about what becomes of a medium; the bits of patches, too."""
    try:
        [made] = pool.load(request)
    except BadRequestError as error:
        return type(error), error.message, error.code, error.status, error.param
    assert not made.feature.flags.writeable
    facts = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    feature = facts.pop("feature")
    return type(made), repr(facts), feature.dtype, feature.shape, feature.tobytes()


CLIP, FRAMES = make_clip(12), tuple(jpeg(number) for number in range(3))
CASES = {
    "picture": ImageRequest(source=GOOD),
    "large": ImageRequest(source=encoded(picture(900, 700), "JPEG")),
    "knobs": ImageRequest(source=GOOD, knobs=ImageKnobs(max_pixels=4 * 32 * 32)),
    "clamped": ImageRequest(source=GOOD, knobs=ImageKnobs(max_pixels=10**9)),
    "bad-knobs": ImageRequest(source=GOOD, knobs=ImageKnobs(max_pixels="x"), param="p"),
    "no-picture": ImageRequest(source=b"no picture", param="messages[0].content[1]"),
    "cut-off": ImageRequest(source=GOOD[:-30], param="p"),
    "empty": ImageRequest(source=b"", param="p"),
    "pillow": ImageRequest(source=picture(70, 50)),
    "ratio": ImageRequest(source=encoded(picture(401, 2)), param="p"),
    "clip": VideoRequest(source=CLIP),
    "clip-whole-fps": VideoRequest(source=CLIP, knobs=VideoKnobs(fps=3)),
    "clip-fps": VideoRequest(source=CLIP, knobs=VideoKnobs(fps=2.5, max_pixels=10**9, video_start=0, video_end=1)),
    "clip-frames": VideoRequest(source=CLIP, knobs=VideoKnobs(num_frames=6)),
    "clip-cut-off": VideoRequest(source=CLIP[: len(CLIP) // 2], param="p"),
    "clip-bad-knobs": VideoRequest(source=CLIP, knobs=VideoKnobs(fps=-1), param="p"),
    "clip-empty": VideoRequest(source=b"", param="p"),
    "frames": VideoRequest(source=FRAMES),
    "frames-fps": VideoRequest(source=FRAMES, knobs=VideoKnobs(fps=4, max_frames=9)),
    "frames-broken": VideoRequest(source=(FRAMES[0], FRAMES[1][:99], FRAMES[2]), param="p"),
    "frames-empty": VideoRequest(source=(), param="p"),
    "frames-of-two-sizes": VideoRequest(source=(FRAMES[0], GOOD), param="p"),
    "frames-pillow": VideoRequest(source=(FRAMES[0], Image.open(io.BytesIO(FRAMES[1])))),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_and_processes_agree_about_everything(both, name):
    threads, processes = (outcome(pool, CASES[name]) for pool in both)
    assert processes == threads


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=8))
def test_any_mix_at_once_gives_what_threads_give(both, names):
    async def play(pool: BlockingPool) -> list[object]:
        calls = (asyncio.to_thread(outcome, pool, CASES[name]) for name in names)
        return await asyncio.gather(*calls)

    threads, processes = (asyncio.run(play(pool)) for pool in both)
    assert processes == threads


def test_patches_lie_where_the_worker_wrote_them_and_are_handed_on_as_they_are(both):
    [made] = both[1].load(CASES["large"])
    assert made.feature.nbytes >= MAPPED_FROM_BYTES
    block = block_of(made.feature)
    assert block is not None
    shared = SharedArrays(block.path.parent)
    name = shared.put(made.feature)
    assert os.stat(shared.directory / name).st_ino == os.stat(block.path).st_ino
    shared.discard(name)


def test_a_file_that_kills_its_worker_fails_alone_and_once(fakes, caplog):
    fake = fakes()
    fake.maker.wait_ready()
    good, bad = ImageRequest(source=GOOD), ImageRequest(source=CRASH, param="here")

    async def play() -> list[object]:
        calls = (fake.pool.pool.load([one]) for one in (bad, good, bad, bad))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, fine, *others = asyncio.run(play())
    assert fine[0].digest == GOOD[:9]
    for error in (first, *others):
        assert isinstance(error, BadRequestError)
        assert (error.status, error.code, error.param) == (400, "media_crash", "here")
        assert "(media worker 0 was killed by SIGSEGV)" in error.message
    assert fake.notes("tried") == ["CRASH"], "it is not tried again"
    with pytest.raises(BadRequestError, match="it is not tried again"):
        fake.load(CRASH)
    assert len(fake.pids()) == 2
    assert "media worker 0 was killed by SIGSEGV: another one is started" in caplog.text
    dead = fake.pids()[0]
    assert not [path for path in fake.shared_dir.iterdir() if path.name.startswith(f"{dead}-")]
    with pytest.raises(FatalMediumError, match="ended with status 7"):
        fake.maker.picture(EXIT, ImageKnobs())
    fake.check_works()


def test_a_worker_that_does_not_come_back_is_killed_while_the_event_loop_goes_on(fakes):
    fake = fakes(picture_time=TimeLimit(seconds=1.0, setting="--that-one"))

    async def play() -> BaseException:
        loading = asyncio.create_task(fake.pool.pool.load([ImageRequest(source=PAUSE, param="here")]))
        turns = 0
        while not loading.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 100
        return loading.exception()

    error = asyncio.run(play())
    assert (error.status, error.code, error.param) == (400, "media_too_costly", "here")
    assert "the picture took longer than 1 s, the limit (setting --that-one): the process" in error.message
    fake.check_works()
    assert len(fake.pids()) == 2


HANGING = {
    "picture": ImageRequest(source=PAUSE, param="here"),
    "clip": VideoRequest(source=PAUSE, param="here"),
    "frames": VideoRequest(source=(PAUSE,), param="here"),
}


@pytest.mark.parametrize(
    ("name", "limit"), [("picture", "picture_time"), ("clip", "video_time"), ("frames", "video_time")]
)
def test_pictures_and_videos_have_limits_of_their_own(fakes, name, limit):
    fake = fakes(**{limit: TimeLimit(seconds=0.2, setting="--own")})
    with pytest.raises(BadRequestError, match=r"took longer than 0\.2 s, the limit \(setting --own\)"):
        fake.pool.load(HANGING[name])
    assert fake.notes("tried") == ["PAUSE"]
    fake.check_works()
    assert len(fake.pids()) == 2


def test_a_worker_has_more_time_than_the_limit_where_it_knows_that_itself(fakes):
    fakes(picture_time=TimeLimit(seconds=0.0, grace_s=PATIENCE_S, setting="--own")).check_works()


def test_a_worker_killed_while_idle_harms_nobody(fakes):
    fake = fakes()
    fake.check_works()
    os.kill(fake.pids()[0], signal.SIGKILL)
    fake.check_works()  # whether or not the death is known by now
    assert len(fake.pids()) == 2


def test_a_file_that_a_worker_did_not_take_is_given_to_the_next_one_and_leaves_nothing(fakes):
    fake = fakes()
    fake.maker.wait_ready()
    [pid] = fake.pids()
    os.kill(pid, signal.SIGSTOP)
    made = []
    thread = threading.Thread(target=lambda: made.append(fake.load(bytes(SHARED_FROM_BYTES))))
    thread.start()
    while not SharedArrays(fake.shared_dir).outstanding():
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert made[0].source_size[0] == fake.pids()[1]
    assert SharedArrays(fake.shared_dir).outstanding() == 0


def test_what_kills_one_worker_after_the_other_before_they_look_at_it_is_given_up(fakes):
    fake = fakes()
    with pytest.raises(EngineError, match="no media worker takes the picture: media worker 0 ended with status 3"):
        fake.load(EARLY)
    fake.check_works()
    assert len(fake.pids()) == 4


def test_workers_that_die_as_soon_as_they_are_idle_are_started_at_intervals(fakes, caplog):
    fake = fakes(first_pause_s=PATIENCE_S)
    fake.maker.wait_ready()
    for count in range(1, 5):
        while len(fake.pids()) < count:
            time.sleep(0.01)
        worker = fake.maker._borrow()  # blocks until it is ready
        os.kill(worker.child.pid, signal.SIGKILL)
        fake.maker._give_back(worker)
    with pytest.raises(EngineError, match=r"^media worker 0 died 4 times before it had done anything$"):
        fake.load(GOOD)
    assert len(fake.pids()) == 4


def test_a_file_whose_worker_was_killed_by_others_may_be_tried_again(fakes):
    fake = fakes()

    def load() -> None:
        with pytest.raises(BadRequestError, match="SIGKILL"):
            fake.load(PAUSE)

    for count in (1, 2):
        thread = threading.Thread(target=load)
        thread.start()
        while len(fake.notes("tried")) < count:
            time.sleep(0.01)
        os.kill(fake.pids()[-1], signal.SIGKILL)
        thread.join()
    assert fake.notes("tried") == ["PAUSE"] * 2


class Pipe:
    """Holds what was sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(bytes(frame))

    def receive(self) -> bytes:
        return self.frames.pop(0)


class OddMaker:
    def picture(self, data: bytes, knobs: ImageKnobs) -> object:
        return object()


def test_what_cannot_be_sent_is_a_failure_of_the_worker_s(tmp_path, caplog):
    there, back = Pipe(), Pipe()
    shared = SharedArrays(tmp_path)
    ours = MessageChannel(
        there.send, back.receive, send_types=WORK_MESSAGES, receive_types=ANSWER_MESSAGES, shared=shared
    )
    theirs = MessageChannel(
        back.send, there.receive, send_types=ANSWER_MESSAGES, receive_types=WORK_MESSAGES, shared=shared
    )
    ours.send(ours.encode(PictureWork(data=np.zeros(3, np.uint8), knobs=ImageKnobs())))
    worker._answer_next(OddMaker(), theirs)
    assert ours.receive() == WorkBegun()
    assert "object" in ours.receive().message


@pytest.mark.parametrize(("order", "log"), [(FAIL, "RuntimeError: a bug"), (LIE, "sent what cannot be used")])
def test_a_bug_is_not_the_client_s_fault_and_told_to_the_log_alone_as_in_threads(
    fakes, caplog, monkeypatch, order, log
):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    fake = fakes()
    monkeypatch.setattr(fake.processor, "process_image", broken)
    with contextlib.closing(fake.make_pool()) as threads, pytest.raises(RuntimeError, match="a bug") as in_threads:
        threads.load(ImageRequest(source=GOOD))
    for _ in range(2):  # it may be tried again
        with pytest.raises(Exception, match=log) as in_processes:
            fake.load(order)
        caplog.clear()
        assert describe(in_processes.value) == describe(in_threads.value)
        assert log in caplog.text
    fake.check_works()


def test_a_start_that_fails_as_none_should_is_told_to_the_log_alone(fakes, caplog, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(process_maker, "ChildProcess", broken)
    with pytest.raises(EngineError, match=r"^media worker 0 cannot be started; the log has the reason$"):
        fakes(first_pause_s=PATIENCE_S).maker.wait_ready()
    assert "RuntimeError: a bug" in caplog.text


def test_a_worker_that_cannot_start_is_tried_again_and_waiting_tells(fakes):
    fake = fakes(plan="die error ok")
    with pytest.raises(EngineError, match=r"^media worker 0 was killed by SIGKILL while starting, as the kernel"):
        fake.maker.wait_ready()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(EngineError):  # with the reason, for as long as there is no worker
            fake.check_works()
            break
        assert time.monotonic() < deadline
    assert len(fake.pids()) == 3


def test_a_worker_logs_as_it_is_told(fakes):
    fake = fakes(log_level="error")
    fake.maker.wait_ready()
    assert fake.notes("levels") == ["ERROR"]


def test_a_worker_that_does_not_get_ready_in_time_has_not_started(fakes):
    fake = fakes(plan="hang", startup_timeout_s=0.5)
    with pytest.raises(
        EngineError, match=r"^media worker 0 is not ready after 0\.5 s; --startup-timeout-s allows more$"
    ):
        fake.maker.wait_ready()


def test_while_no_worker_can_be_started_requests_fail_with_the_reason(fakes):
    fake = fakes(plan="error")
    for _ in range(2):
        with pytest.raises(EngineError, match=r"^no processor in there$"):
            fake.load(GOOD)


def test_closing_ends_workers_whatever_they_do(fakes):
    fake = fakes(count=2)
    fake.maker.wait_ready()
    errors = []

    def load() -> None:
        with pytest.raises(BadRequestError) as caught:
            fake.load(PAUSE)
        errors.append(caught.value)

    thread = threading.Thread(target=load)
    thread.start()
    while not fake.notes("tried"):
        time.sleep(0.01)
    began = time.monotonic()
    fake.pool.close()
    assert time.monotonic() - began < STOP_PATIENCE_S
    thread.join()
    assert [(error.status, error.code) for error in errors] == [(503, "shutting_down")]
    with pytest.raises(BadRequestError, match="shutting down"):
        fake.maker.picture(GOOD, ImageKnobs())


def test_closing_while_workers_start(fakes):
    fakes(count=2).pool.close()
