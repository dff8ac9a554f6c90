"""What an `AsyncLLM` can be told while it computes, and several requests as one message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.tiny_adapters import with_adapter, write_adapter
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import ask, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.commands.offline.async_llm import AsyncLLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.frontend.live_requests import RequestAbortedError
from vlmserve.frontend.request_builder import ChatPrompt, GenerateReqInput, TextPrompt
from vlmserve.frontend.stage import StageLimits
from vlmserve.ipc.messages import BatchTokenizedGenerateReqInput
from vlmserve_common.errors import BadRequestError, CheckpointError, EngineError


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    args = EngineArgs(model="", media_processes=0, num_threads=1, max_total_tokens=4096, schedule_policy="priority")
    engine = AsyncLLM(args, StageLimits(), joined=True, max_pending=8)
    yield engine
    engine.close()


async def answer(engine: AsyncLLM, name: str, tokens: int) -> str:
    sampling = SamplingOverrides(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompt = TextPrompt(text="Hello " * 20)
    request = GenerateReqInput(request_id=name, prompt=prompt, sampling_params=sampling, priority=-5)
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

    asyncio.run(asyncio.wait_for(scenario(), 60))


GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=4, ignore_eos=True)


def test_one_message_and_one_picture_for_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("qwen3_vl", tmp_path)
    shown = picture(1, 96, 64)
    chats = [ask(shown, text) for text in ("What is this?", "How large is it?", "Name a colour.")]
    with LLM(str(folder), num_threads=1) as llm:
        wanted = [answer.token_ids for answer in llm.chat_batch(chats, GREEDY)]
    args = EngineArgs(model=str(folder), num_threads=1, media_processes=0)
    engine = AsyncLLM(args, StageLimits(), joined=True, max_pending=8)
    sent, loaded = [], []
    put, load = engine._manager._send, engine._manager._media.load

    def spy(message):
        sent.append(message)
        put(message)

    async def counted(media, **options):
        loaded.append(media)
        return await load(media, **options)

    monkeypatch.setattr(engine._manager, "_send", spy)
    monkeypatch.setattr(engine._manager._media, "load", counted)
    requests = [
        GenerateReqInput(request_id=f"r{i}", prompt=ChatPrompt(messages=chat), sampling_params=GREEDY, n=1 + (i == 1))
        for i, chat in enumerate(chats)
    ]

    async def run(asked):
        return {choice.index: choice.output.token_ids async for choice in engine.generate_batch(asked)}

    try:
        answers = asyncio.run(run(requests))
        assert [answers[index] for index in range(4)] == [wanted[0], wanted[1], wanted[1], wanted[2]]
        [message] = sent
        assert isinstance(message, BatchTokenizedGenerateReqInput)
        features = {id(item.feature) for request in message.requests for item in request.mm_inputs.items}
        assert len(message.requests) == 4
        assert len(features) == len(loaded) == 1
        with pytest.raises(BadRequestError, match="the limit is 8"):
            asyncio.run(run(requests * 3))
    finally:
        engine.close()


def test_messages_are_checked_as_by_the_server(engine: AsyncLLM) -> None:
    prompt = ChatPrompt(messages=[{"role": "user", "content": "hi", "colour": "red"}])
    request = GenerateReqInput(request_id="wrong", prompt=prompt)

    async def scenario() -> None:
        for outputs in (engine.generate(request), engine.generate_batch([request])):
            with pytest.raises(BadRequestError, match=r"messages\[0\].colour"):
                await anext(outputs)

    asyncio.run(scenario())


async def ids(engine: AsyncLLM, lora: str | None = None, name: str = "") -> tuple[int, ...]:
    sampling = replace(GREEDY, max_new_tokens=6)
    request = GenerateReqInput(
        request_id=f"{lora} {name}", prompt=TextPrompt(text="Name a colour."), sampling_params=sampling
    )
    return tuple([one async for one in engine.generate(request, lora=lora)][-1].output.token_ids)


def test_adapters_and_weights_change_between_requests(tmp_path: Path) -> None:
    folders = [make_checkpoint("qwen3_vl", tmp_path / str(seed), seed=seed) for seed in range(2)]
    adapter = write_adapter(folders[0], tmp_path / "adapter", seed=3)
    wanted = []
    for folder in (*folders, with_adapter(folders[0], adapter, tmp_path / "with")):
        with LLM(str(folder), num_threads=1) as llm:
            wanted.append(tuple(llm.generate("Name a colour.", replace(GREEDY, max_new_tokens=6))[0].token_ids))
    one, two, tuned = wanted
    assert len(set(wanted)) == 3

    async def scenario() -> None:
        with pytest.raises(BadRequestError, match="there is no adapter 'tuned'; loaded are: early"):
            await ids(engine, "tuned")
        await engine.load_lora_adapter("tuned", adapter)
        with pytest.raises(BadRequestError, match="as an adapter here is called already"):
            await engine.load_lora_adapter("tuned", adapter)
        with pytest.raises(BadRequestError, match="is no folder"):
            await engine.load_lora_adapter("other", tmp_path / "nowhere")
        assert await asyncio.gather(*(ids(engine, name) for name in ("tuned", "early", None))) == [tuned, tuned, one]
        under_way = asyncio.ensure_future(ids(engine, "tuned", "last"))
        await asyncio.sleep(0)  # it has its adapter
        await asyncio.gather(engine.unload_lora_adapter("tuned"), engine.unload_lora_adapter("early"))
        assert await under_way == tuned
        assert not engine._engine.runner.adapters._adapters
        with pytest.raises(BadRequestError, match="there is no adapter 'tuned'"):
            await engine.unload_lora_adapter("tuned")

        with pytest.raises(CheckpointError, match="nowhere"):
            await engine.weights.update_weights_from_disk(tmp_path / "nowhere")
        before = asyncio.ensure_future(ids(engine, name="before"))
        while not engine._manager.door.inside:
            await asyncio.sleep(0)
        change = asyncio.ensure_future(engine.weights.update_weights_from_disk(folders[1]))
        while not engine._manager.door._reasons:  # it is checked first
            await asyncio.sleep(0)
        after = asyncio.ensure_future(ids(engine, name="after"))
        assert [await before, await after] == [one, two]
        await change
        await engine.weights.update_weights_from_tensor(load_file(folders[0] / "model.safetensors"))
        assert await ids(engine) == one
        await engine.weights.sleep()
        waits = asyncio.ensure_future(ids(engine))
        await asyncio.sleep(0.01)
        assert not waits.done()
        await engine.weights.wake_up(["weights"])
        await engine.weights.wake_up()
        assert await waits == one
        await engine.weights.sleep(2)
        with pytest.raises(EngineError, match="tensors of the weights are missing"):
            await ids(engine)
        await engine.weights.wake_up()
        await engine.weights.update_weights_from_disk(folders[1])
        assert await ids(engine) == two

    engine = AsyncLLM(folders[0], num_threads=1, joined=True, enable_lora=True, lora_paths=f"early={adapter}")
    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        engine.close()
