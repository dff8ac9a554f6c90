"""Media in worker processes that live and die: the same results as in threads, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from processors.knobs import ImageKnobs
from processors.pool import prepare_processes
from processors.pool.maker import DirectMaker, FatalMediumError, MediaWork
from processors.pool.media_process import WorkerBugError
from processors.pool.media_worker import run_worker
from processors.pool.process_maker import ProcessMaker, ProcessSettings, WorkerMain
from processors.video.options import VideoKnobs
from tests.processors import fake_media_worker as fakery
from tests.processors.clips import jpeg, make_clip
from tests.processors.fake_media_worker import PAUSE, fake_worker, hurried_worker, noting_worker
from tests.processors.helpers import encoded, picture, tiny_processor
from tests.vlmserve.server_process import PATIENCE_S, gone
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.child import STOP_PATIENCE_S
from vlmserve_common.transport.shm import MAPPED_FROM_BYTES, SharedArrays, block_of
from vlmserve_common.transport.wire import SHARED_FROM_BYTES

GOOD = encoded(picture(60, 60))
KNOBS = ImageKnobs()


def picture_work(data: bytes, knobs: ImageKnobs = KNOBS) -> MediaWork:
    return MediaWork(files=[data], knobs=knobs)


class Fakes:
    """A maker over worker processes, of the real kind or of that which can be told to die."""

    def __init__(self, main: WorkerMain = fake_worker, *, plan: str = "ok", count: int = 1, **more: Any) -> None:
        self._private = PrivateDirectory(shared_memory_base(), "vlmserve-test")
        self.folder = folder = self._private.path
        self.shared_dir = folder / "shared"
        self.shared_dir.mkdir()
        (folder / "plan").write_text(plan)
        self.processor = tiny_processor(folder, "qwen3_vl", max_pixels=10**6)
        given = {"first_pause_s": 0.01, "picture_s": PATIENCE_S, "video_s": PATIENCE_S, "video_grace_s": 0.0, **more}
        self.maker = ProcessMaker(
            self.processor, ProcessSettings(count=count, shared_dir=self.shared_dir, **given), main
        )

    def notes(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def pids(self) -> list[int]:
        return [int(line) for line in self.notes("pids")]

    async def tried(self, count: int) -> None:
        """Until workers are at so many odd media."""
        while len(self.notes("tried")) < count:
            await asyncio.sleep(0.01)

    async def check_works(self) -> None:
        assert bytes((await self.maker.make(picture_work(GOOD))).feature[0, : len(GOOD)]) == GOOD

    def finish(self) -> None:
        self.maker.close_now()
        assert all(gone(pid) for pid in self.pids())
        gc.collect()
        left = list(self.shared_dir.iterdir())
        self._private.close()
        assert left == []


def fds() -> set[str]:
    return {f"{fd.name} {os.readlink(fd)}" for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


@pytest.fixture
def fakes() -> Iterator[Callable[..., Fakes]]:
    """Makes one; afterwards nothing of it may be left."""
    made: list[Fakes] = []
    resource_tracker.ensure_running()
    prepare_processes()
    before, threads = fds(), set(threading.enumerate())

    def make(**settings: Any) -> Fakes:
        made.append(Fakes(**settings))
        return made[-1]

    yield make
    for one in made:
        one.finish()
    assert not [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("media-")]
    assert fds() <= before  # others' may be closed meanwhile


def run(play: Coroutine[Any, Any, Any]) -> Any:
    """To the end, in an event loop whose threads are gone afterwards."""
    return asyncio.run(asyncio.wait_for(play, 4 * PATIENCE_S))


# ---------------------------------------------------------------- with real ones


@pytest.fixture(scope="module")
def real() -> Iterator[Fakes]:
    one = Fakes(run_worker, count=2)
    yield one
    one.finish()


CLIP, FRAMES = make_clip(12), [jpeg(number) for number in range(3)]
LARGE = encoded(picture(900, 700), "JPEG")
NARROW = VideoKnobs(fps=2.5, max_pixels=10**9, video_start=0, video_end=1)
CASES = {
    "picture": picture_work(GOOD),
    "large": picture_work(LARGE),
    "knobs": picture_work(GOOD, ImageKnobs(max_pixels=4 * 32 * 32)),
    "clamped": picture_work(GOOD, ImageKnobs(max_pixels=10**9)),
    "cut-off": picture_work(GOOD[:-30]),
    "empty": picture_work(b""),
    "ratio": picture_work(encoded(picture(401, 2))),
    "clip": MediaWork(files=[CLIP], knobs=NARROW),
    "clip-cut-off": MediaWork(files=[CLIP[: len(CLIP) // 2]], knobs=VideoKnobs()),
    "frames": MediaWork(files=FRAMES, knobs=VideoKnobs(fps=4, max_frames=9), listed=True),
    "frames-broken": MediaWork(files=[FRAMES[0], FRAMES[1][:99]], knobs=VideoKnobs(), listed=True),
    "frames-empty": MediaWork(files=[], knobs=VideoKnobs(), listed=True),
}


def facts_of(made: Any) -> object:
    """All that can be said about what becomes of a medium; the bits of patches, too."""
    if isinstance(made, BadRequestError):
        return made.message, made.code, made.status
    facts = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    feature = facts.pop("feature")
    assert not feature.flags.writeable
    return type(made), repr(facts), feature.dtype, feature.shape, feature.tobytes()


def test_threads_and_processes_agree_about_everything_also_at_once(real):
    direct = DirectMaker(real.processor)

    def here(work: MediaWork) -> Any:
        try:
            return direct.make(work)
        except BadRequestError as error:
            return error

    async def play() -> list[Any]:
        return await asyncio.gather(*map(real.maker.make, CASES.values()), return_exceptions=True)

    for name, made in zip(CASES, run(play()), strict=True):
        assert facts_of(made) == facts_of(here(CASES[name])), name


def test_a_look_at_a_clip_is_the_same_in_threads_and_processes(real):
    work = MediaWork(files=[CLIP], knobs=VideoKnobs(sampling="question", num_frames=4))
    found = run(real.maker.look(work))
    assert found == DirectMaker(real.processor).look(work)
    assert found.places
    assert all(file.startswith(b"\xff\xd8") for file in found.pictures)
    with pytest.raises(BadRequestError, match="video"):
        run(real.maker.look(dataclasses.replace(work, files=[GOOD])))


def test_patches_lie_where_the_worker_wrote_them_and_are_handed_on_as_they_are(real):
    made = run(real.maker.make(picture_work(LARGE)))
    assert made.feature.nbytes >= MAPPED_FROM_BYTES
    block = block_of(made.feature)
    assert block is not None
    shared = SharedArrays(block.path.parent)
    name = shared.put(made.feature)
    assert os.stat(shared.directory / name).st_ino == os.stat(block.path).st_ino
    shared.discard(name)


def test_a_worker_takes_little_memory_of_its_own(fakes):
    fake = fakes(main=noting_worker)
    run(fake.maker.make(picture_work(encoded(picture(2000, 1500), "JPEG"))))
    run(fake.maker.make(MediaWork(files=[CLIP], knobs=VideoKnobs())))
    [pid] = fake.pids()
    sizes = re.findall(r"Private_\w+: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert sum(map(int, sizes)) < 80 * 1024
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(r"Max core file size +0 ", limits)
    assert re.search(r"Max address space +\d+ ", limits)
    assert re.search(r"NoNewPrivs:\s+1", Path(f"/proc/{pid}/status").read_text())


# ---------------------------------------------------------------- what media do to their worker


@pytest.mark.parametrize(
    ("order", "code", "message"),
    [
        (fakery.CRASH, "media_crash", r"\(media worker 0 was killed by SIGSEGV\)"),
        pytest.param(fakery.EXIT, "media_crash", "ended with status 7", marks=pytest.mark.slow),
        (fakery.EAT, "media_too_costly", r"the picture takes more memory than the 4\.0 GiB .* --max-image-pixels"),
    ],
)
def test_a_file_that_ends_its_worker_fails_alone(fakes, caplog, order, code, message):
    async def play() -> None:
        calls = (fake.maker.make(picture_work(one)) for one in (order, GOOD))
        error, fine = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(error, FatalMediumError)
        assert (error.status, error.code) == (400, code)
        assert re.search(message, error.message)
        assert fine.digest == GOOD[:9]

    fake = fakes()
    run(play())
    assert fake.notes("tried") == [order.decode()]
    assert len(fake.pids()) == 2
    assert re.search("media worker 0 .*: starting it again", caplog.text)
    assert not [path for path in fake.shared_dir.iterdir() if path.name.startswith(f"{fake.pids()[0]}-")]


def test_cpu_time_is_the_kernel_s_to_limit(fakes):
    async def play() -> None:
        with pytest.raises(
            FatalMediumError, match=r"took longer than .* s, the limit \(setting --max-image-decode-s\)"
        ):
            await fake.maker.make(picture_work(fakery.SPIN))
        await fake.check_works()

    fake = fakes(main=hurried_worker)
    began = time.monotonic()
    run(play())
    assert time.monotonic() - began < PATIENCE_S
    assert len(fake.pids()) == 2


def test_a_worker_opens_few_files(fakes):
    with pytest.raises(WorkerBugError, match="Too many open files"):
        run(fakes().maker.make(picture_work(fakery.FILES)))


@pytest.mark.parametrize("kind", ["picture", "clip", pytest.param("frames", marks=pytest.mark.slow)])
def test_pictures_and_videos_have_limits_of_their_own(fakes, kind):
    limit, setting = ("picture_s", "image") if kind == "picture" else ("video_s", "video")
    fake = fakes(**{limit: 1.0})
    work = MediaWork(files=[PAUSE], knobs=KNOBS if kind == "picture" else VideoKnobs(), listed=kind == "frames")
    message = rf"took longer than 1 s, the limit \(setting --max-{setting}-decode-s\): the process"
    with pytest.raises(FatalMediumError, match=message) as caught:
        run(fake.maker.make(work))
    assert (caught.value.status, caught.value.code) == (400, "media_too_costly")
    run(fake.check_works())
    assert len(fake.pids()) == 2


def test_a_worker_has_more_time_than_the_limit_where_it_knows_that_itself(fakes):
    fake = fakes(video_s=0.0, video_grace_s=PATIENCE_S)
    with pytest.raises(WorkerBugError, match="made a ProcessedImage of a video"):
        run(fake.maker.make(MediaWork(files=[GOOD], knobs=VideoKnobs())))


def test_work_whose_client_has_gone_is_ended_and_what_waits_is_never_begun(fakes, caplog):
    async def play() -> None:
        calls = [asyncio.create_task(fake.maker.make(picture_work(PAUSE))) for _ in range(2)]
        await fake.tried(1)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        await fake.check_works()

    fake = fakes()
    run(play())
    assert fake.notes("tried") == ["PAUSE"]
    assert len(fake.pids()) == 2
    assert "starting it again" not in caplog.text, "clients that leave are no trouble of the server's"


def test_a_bug_is_nobody_s_fault(fakes):
    fake = fakes()
    for order, log in ((fakery.FAIL, "RuntimeError: a bug"), (fakery.ODD, "object"), (fakery.LIE, "cannot be used")):
        for _ in range(2):  # it may be tried again
            with pytest.raises(WorkerBugError, match=log):
                run(fake.maker.make(picture_work(order)))
        run(fake.check_works())


# ---------------------------------------------------------------- what others do to workers


def test_a_worker_killed_while_idle_is_replaced_and_harms_nobody(fakes):
    fake = fakes()
    run(fake.check_works())
    os.kill(fake.pids()[0], signal.SIGKILL)
    run(fake.check_works())  # whether or not the death is known by now
    assert len(fake.pids()) == 2


@pytest.mark.parametrize("how", ["killed", "stopped", "stopped in work"])
def test_a_file_that_a_worker_did_not_take_or_do_is_given_to_the_next_one_and_leaves_nothing(fakes, how):
    async def play() -> Any:
        data = fakery.ONCE if how == "stopped in work" else bytes(SHARED_FROM_BYTES)
        call = asyncio.create_task(fake.maker.make(picture_work(data)))
        if how == "stopped in work":
            await fake.tried(1)
            os.kill(pid, signal.SIGSTOP)
        while how == "killed" and not SharedArrays(fake.shared_dir).outstanding():
            await asyncio.sleep(0.01)
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        return await call

    fake = fakes() if how == "killed" else fakes(picture_s=1.0)
    fake.maker.wait_ready()
    [pid] = fake.pids()
    if how != "stopped in work":
        os.kill(pid, signal.SIGSTOP)
    assert run(play()).source_size[0] == fake.pids()[-1] != pid
    assert SharedArrays(fake.shared_dir).outstanding() == 0


def test_what_kills_one_worker_after_the_other_before_they_look_at_it_is_given_up(fakes):
    fake = fakes(plan="early early early ok")
    with pytest.raises(EngineError, match="no media worker takes the picture: media worker 0 ended with status 3"):
        run(fake.maker.make(picture_work(GOOD)))
    run(fake.check_works())
    assert len(fake.pids()) == 4


# ---------------------------------------------------------------- starting and ending


def test_a_worker_that_cannot_start_is_tried_again_and_waiting_tells(fakes):
    fake = fakes(plan="die error error error error ok")
    with pytest.raises(EngineError, match=r"^media worker 0 was killed by SIGKILL while starting, as the kernel"):
        fake.maker.wait_ready()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(EngineError):  # with the reason, for as long as there is no worker
            run(fake.check_works())
            break
        assert time.monotonic() < deadline
    assert len(fake.pids()) == 6


def test_work_waits_for_a_worker_that_is_well_while_another_one_is_down(fakes):
    async def play() -> None:
        fake.maker.wait_ready()
        (fake.folder / "plan").write_text("error")
        os.kill(fake.pids()[0], signal.SIGKILL)
        while len(fake.pids()) < 5:  # three more of the one that is down then
            await fake.check_works()
        for _ in range(9):
            await asyncio.gather(*(fake.check_works() for _ in range(5)))

    fake = fakes(count=2, first_pause_s=PATIENCE_S)
    run(play())


def test_closing_ends_workers_whatever_they_do(fakes):
    async def play() -> None:
        calls = [asyncio.create_task(fake.maker.make(picture_work(PAUSE))) for _ in range(3)]
        await fake.tried(2)
        began = time.monotonic()
        await fake.maker.close()
        assert time.monotonic() - began < STOP_PATIENCE_S
        calls.append(asyncio.create_task(fake.maker.make(picture_work(GOOD))))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, BadRequestError)
            assert (error.status, error.code) == (503, "shutting_down")

    fake = fakes(count=2)
    run(play())


def test_a_file_whose_worker_was_killed_by_others_is_not_to_blame(fakes):
    async def play() -> None:
        call = asyncio.create_task(fake.maker.make(picture_work(PAUSE)))
        await fake.tried(1)
        os.kill(fake.pids()[-1], signal.SIGKILL)
        with pytest.raises(BadRequestError, match="SIGKILL") as caught:
            await call
        assert not isinstance(caught.value, FatalMediumError)

    fake = fakes()
    run(play())
