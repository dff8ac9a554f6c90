"""Many requests at a time for an engine on the device under test, each with its own sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import torch

from vlmserve.commands.offline.async_llm import AsyncLLM
from vlmserve.commands.offline.inputs import read_settings

Result = TypeVar("Result")


@asynccontextmanager
async def async_engine(folder: Path, device: torch.device, **settings: object) -> AsyncIterator[AsyncLLM]:
    """Start an engine that takes up to a thousand requests at a time."""
    args, limits = read_settings(folder, None, {"device": str(device), "num_threads": 1} | settings)
    llm = AsyncLLM(args, limits, joined=False, max_pending=1000)
    try:
        yield llm
    finally:
        await asyncio.to_thread(llm.close)


async def some_at_a_time(most: int, calls: Iterable[Callable[[], Awaitable[Result]]]) -> list[Result]:
    """Make calls in order, up to `most` of them at a time; return their results in the same order."""
    turns = asyncio.Semaphore(most)

    async def call(one: Callable[[], Awaitable[Result]]) -> Result:
        async with turns:
            return await one()

    return list(await asyncio.gather(*map(call, calls)))
