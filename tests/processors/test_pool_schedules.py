"""The pool under any order of events: what runs when, who is called off or refused meanwhile, what fails.

The pool's threads are the test's own: at each point where others could run, it is drawn who does. What is run in
between goes on to its end first, which real threads need not do; but every such point is one in somebody else's work.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from processors.fetch.fetching import FetchSettings, MediaFetcher
from processors.fetch.media_file import MediaFile
from processors.pool import pool as pool_module
from processors.pool.making import FatalMediumError
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pool.requests import ImageRequest
from processors.processed import ProcessedImage
from tests import hf_env  # noqa: F401
from tests.processors.helpers import tiny_processor
from vlmserve_common.errors import BadRequestError

CONTENTS = (b"one", b"two")


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("processor"), "qwen2_vl")


class World:
    """A pool, all that is asked of it, and whose turn it is.

    tape: bytes that decide; nothing happens by itself when they are used up.
    """

    def __init__(self, processor, tape, cache_mib):
        self.tape = iter(tape)
        self.queue = []  # (future, function, arguments)
        self.jobs = {}  # job: content
        self.making = Counter()
        self.closed = False
        self.wrong = []  # what should not have been seen, in places where the pool would catch an AssertionError
        self.pool = ProcessorPool(processor, Fetcher(self), PoolSettings(cache_mib=cache_mib), maker=Maker(self))

    def choose(self, things):
        """The first one when the tape is at its end."""
        return things[next(self.tape, 0) % len(things)]

    def others_run(self):
        """Something happens in other threads, or nothing does."""
        while event := self.choose([None, self.come, self.run, self.run, self.call_off, self.close]):
            event()

    def come(self):
        content = self.choose(CONTENTS)
        source = self.choose([content, f"data:{content.decode()}", File(self, content)])
        try:
            [job] = self.pool._take([ImageRequest(source=source, param=f"p{len(self.jobs)}")])
        except BadRequestError as error:
            if not self.closed or error.status != 503:
                self.wrong.append("only a closed pool refuses")
        else:
            self.jobs[job] = content

    def run(self):
        if self.queue:
            self.run_at(self.choose(range(len(self.queue))))

    def run_at(self, place):
        future, function, arguments = self.queue.pop(place)
        if future.set_running_or_notify_cancel():
            future.set_result(function(*arguments))

    def call_off(self):
        if self.jobs:
            job = self.choose(list(self.jobs))
            waited = self.waits(job)
            job.call_off()
            if waited and job in self.pool._jobs:
                self.wrong.append("what waits goes at once")

    def waits(self, job):
        queued = any(job in arguments and not future.cancelled() for future, _, arguments in self.queue)
        return queued or any(job in followers for followers in self.pool._in_flight._followers.values())

    def close(self):
        if next(self.tape, 0) % 6 == 1:
            self.closed = True
            waiting = [job for job in self.jobs if self.waits(job)]
            self.pool.close()
            self.wrong += ["what waits is told at once" for job in waiting if not job.answer.done()]

    def finish(self):
        while self.queue:
            self.run_at(0)


class Executor:
    """Work for the world to do in some order."""

    world: World

    def __init__(self):
        self.closed = False

    def submit(self, function, *arguments):
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Waited(self.world)
        self.world.queue.append((future, function, arguments))
        return future

    def shutdown(self, wait=True):
        self.closed = True  # what is queued is run later


class Waited(Future):
    def __init__(self, world):
        super().__init__()
        self.world = world

    def result(self, timeout=None):
        self.world.others_run()
        for place, (future, *_) in enumerate(self.world.queue):
            if future is self:
                self.world.run_at(place)
                break
        return super().result(0)


class Fetcher(MediaFetcher):
    """Of data: URLs that are not base64."""

    def __init__(self, world):
        super().__init__(FetchSettings())
        self.world = world

    def child(self):
        return self

    def _fetch(self, url, limit):
        self.world.others_run()
        return url.removeprefix("data:").encode()


class File(MediaFile):
    modality = None

    def __init__(self, world, content):
        self.world = world
        self.content = content

    def read(self, limit):
        self.world.others_run()
        if self.world.choose(range(6)) == 1:
            raise BadRequestError("there is no file")
        return self.content


class Maker:
    def __init__(self, world):
        self.world = world

    def picture(self, data, knobs):
        world = self.world
        if world.making[data]:
            world.wrong.append("one makes it for all")
        if not any(content == data and not job.answer.done() for job, content in world.jobs.items()):
            world.wrong.append("nobody wants it")
        world.making[data] += 1
        world.others_run()
        world.making[data] -= 1
        if error := world.choose([None, None, None, BadRequestError, RuntimeError, FatalMediumError]):
            raise error("no good")
        return ProcessedImage(
            digest=data,
            patch_digests=(data,),
            grid_thw=(1, 2, 2),
            feature=np.zeros(3, np.uint8),
            num_tokens=1,
            source_size=(1, 1),
        )

    def close(self):
        pass


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tape=st.binary(min_size=100, max_size=400), cache_mib=st.sampled_from([0, 1]))
def test_everybody_is_answered_once_whatever_happens(processor, tape, cache_mib):
    with pytest.MonkeyPatch.context() as patch:
        executors = []
        patch.setattr(pool_module, "ThreadPoolExecutor", lambda *_, **__: executors.append(Executor()) or executors[-1])
        world = World(processor, tape, cache_mib)
    for executor in executors:
        executor.world = world
    world.come()
    while (before := next(world.tape, None)) is not None:
        world.tape = chain([before], world.tape)
        world.others_run()
    world.finish()
    assert world.wrong == []
    assert world.pool.in_pool == 0
    assert len(world.pool._in_flight) == 0
    errors = []
    for place, (job, content) in enumerate(world.jobs.items()):
        assert job.answer.done()
        if job.called_off:
            continue
        error = job.answer.exception()
        if error is None:
            assert job.answer.result().digest == content
        elif isinstance(error, BadRequestError):
            assert error.param == f"p{place}", "each one's own"
        else:
            assert type(error) is RuntimeError
            assert str(error) == "no good"
        errors += [error] * (error is not None)
    assert len(set(map(id, errors))) == len(errors)
