"""Several requests as one message, through `AsyncLLM`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import ask, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.commands.offline.async_llm import AsyncLLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.frontend.request_builder import ChatPrompt, GenerateReqInput
from vlmserve.frontend.stage import StageLimits
from vlmserve.ipc.messages import BatchTokenizedGenerateReqInput
from vlmserve_common.errors import BadRequestError

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
