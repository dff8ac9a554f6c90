"""The pool under any order of events: who comes when, who leaves, what is fetched, made or fails when, and closing."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from processors.fetch.fetching import MediaFetcher
from processors.fetch.limits import FetchSettings
from processors.pool.maker import FatalMediumError
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pool.requests import ImageRequest
from tests import hf_env  # noqa: F401
from tests.processors.helpers import processed, tiny_processor
from vlmserve_common.errors import BadRequestError

CONTENTS = (b"one", b"two")
OUTCOMES = (None, None, None, BadRequestError, RuntimeError, FatalMediumError)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("processor"), "qwen2_vl")


class World:
    """A pool, all that is asked of it, and what happens next.

    tape: bytes that decide; nothing happens by itself when they are used up.
    """

    def __init__(self, processor, tape, cache_mib):
        self.tape = iter(tape)
        self.steps = []  # futures that fetching and making wait for
        self.loads = {}  # task: content
        self.called_off = set()
        self.making = Counter()
        self.closing = None
        self.pool = ProcessorPool(processor, Fetcher(self), PoolSettings(cache_mib=cache_mib), maker=Maker(self))

    def choose(self, things):
        """The first one when the tape is at its end."""
        return things[next(self.tape, 0) % len(things)]

    async def step(self):
        """Somebody else's turn, until this one's comes."""
        future = asyncio.get_running_loop().create_future()
        self.steps.append(future)
        await future

    def come(self):
        content = self.choose(CONTENTS)
        source = self.choose([content, f"data:{content.decode()}"])
        request = ImageRequest(source=source, param=f"p{len(self.loads)}")
        self.loads[asyncio.create_task(self.pool.load([request]))] = content

    def go_on(self):
        waiting = [future for future in self.steps if not future.done()]
        if waiting:
            self.choose(waiting).set_result(None)

    def call_off(self):
        under_way = [task for task in self.loads if not task.done()]
        if under_way:
            task = self.choose(under_way)
            task.cancel()
            self.called_off.add(task)

    def close(self):
        if self.choose(range(6)) == 1 and self.closing is None:
            self.closing = asyncio.create_task(self.pool.close())

    async def run(self):
        self.come()
        for choice in self.tape:
            [self.come, self.go_on, self.go_on, self.call_off, self.close][choice % 5]()
            for _ in range(self.choose(range(4))):
                await asyncio.sleep(0)
        while not all(task.done() for task in self.loads):
            self.go_on()
            await asyncio.sleep(0)
        if self.closing is not None:
            await self.closing


class Fetcher(MediaFetcher):
    def __init__(self, world):
        super().__init__(FetchSettings())
        self.world = world

    async def fetch(self, source, **_):
        await self.world.step()
        if self.world.choose(range(6)) == 1:
            raise BadRequestError("there is no file")
        return source.removeprefix("data:").encode()


class Maker:
    def __init__(self, world):
        self.world = world

    async def make(self, work, *, client=""):
        [data], world = work.files, self.world
        assert not world.making[data], "one makes it for all"
        world.making[data] += 1
        try:
            await world.step()
        finally:
            world.making[data] -= 1
        if error := world.choose(OUTCOMES):
            raise error("no good")
        return processed(data, np.zeros(3, np.uint8))

    async def close(self):
        pass


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tape=st.binary(min_size=100, max_size=400), cache_mib=st.sampled_from([0, 1]))
def test_everybody_is_answered_whatever_happens(processor, tape, cache_mib):
    async def scenario():
        world = World(processor, tape, cache_mib)
        await world.run()
        assert world.pool.in_pool == 0
        await asyncio.sleep(0)
        assert not any(world.making.values()), "what nobody wants is not made"
        for place, (task, content) in enumerate(world.loads.items()):
            if task.cancelled():
                assert task in world.called_off
            elif isinstance(error := task.exception(), BadRequestError):
                assert error.status == 400 or world.closing is not None
                assert error.param in (f"p{place}", None if error.status == 503 else "")
            elif error is not None:
                assert type(error) is RuntimeError
                assert str(error) == "no good"
            else:
                assert task.result()[0].digest == content
        await world.pool.close()

    asyncio.run(scenario())
