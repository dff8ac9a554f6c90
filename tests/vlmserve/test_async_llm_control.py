"""What an `AsyncLLM` can be told while it computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from vlmserve.commands.offline.async_llm import AsyncLLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.frontend.live_requests import RequestAbortedError
from vlmserve.frontend.request_builder import GenerateReqInput, TextPrompt
from vlmserve.frontend.sampling import SamplingOverrides
from vlmserve.frontend.stage import StageLimits
from vlmserve_common.errors import EngineError


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    args = EngineArgs(model="", media_processes=0, num_threads=1, max_total_tokens=4096)
    engine = AsyncLLM(args, StageLimits(), joined=True, max_pending=8)
    yield engine
    engine.close()


async def answer(engine: AsyncLLM, name: str, tokens: int) -> str:
    sampling = SamplingOverrides(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    request = GenerateReqInput(request_id=name, prompt=TextPrompt(text="Hello " * 20), sampling_params=sampling)
    return "".join([choice.output.text async for choice in engine.generate(request)])


async def waiting(engine: AsyncLLM) -> int:
    stats = await engine.stats()
    assert stats is not None
    return stats.num_waiting_reqs


def test_paused_requests_wait_and_can_be_aborted(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        await engine.pause()
        with pytest.raises(EngineError, match="paused already"):
            await engine.pause()
        first, second = (asyncio.ensure_future(answer(engine, name, 8)) for name in ("first", "second"))
        while await waiting(engine) < 2:
            await asyncio.sleep(0.01)
        steps = (await engine.stats()).forward_steps_total
        assert await engine.abort("first") == ["first"]
        assert await waiting(engine) == 1
        assert await engine.abort("first") == []
        with pytest.raises(RequestAbortedError):
            await first
        assert (await engine.stats()).forward_steps_total == steps
        await engine.resume()
        assert await second
        with pytest.raises(EngineError, match="not paused"):
            await engine.resume()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_is_cached_is_forgotten(engine: AsyncLLM) -> None:
    async def scenario() -> None:
        await answer(engine, "cached", 4)
        cached = (await engine.stats()).kv_cached_tokens
        assert cached > 0
        assert await engine.flush_cache() == cached
        assert await engine.flush_cache() == 0
        running = asyncio.ensure_future(answer(engine, "running", 3000))
        while not (await engine.stats()).num_running_reqs:
            await asyncio.sleep(0.01)
        await engine.flush_cache()
        assert await engine.abort() == ["running"]
        await asyncio.gather(running, return_exceptions=True)
        stats = await engine.stats()
        assert stats.num_running_reqs == 0
        assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens

    asyncio.run(asyncio.wait_for(scenario(), 60))
