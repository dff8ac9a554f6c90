"""What requests may bring goes through stages: embeddings, logits processors, and ends that come in between."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.parallel.sharing import GREEDY, SETTINGS, assert_alike
from tests.vlmserve.reference import conversations, picture
from tests.vlmserve.test_embeds import encoded, our_rows, with_parts
from tests.vlmserve.test_scoring import PROCESSORS
from vlmserve import LLM, SamplingOverrides
from vlmserve.commands.offline.async_llm import AsyncLLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.frontend.live_requests import RequestAbortedError
from vlmserve.frontend.request_builder import EmbedsPrompt, GenerateReqInput, TextPrompt
from vlmserve.frontend.requests import read_input_embeds
from vlmserve.frontend.stage import StageLimits
from vlmserve.ipc.messages import LogitsProcessorCall
from vlmserve_common.errors import EngineError

HIDDEN = 64
FORBID = LogitsProcessorCall(name="forbid", params={"ids": [5, 300], "again": True})
FAILS = LogitsProcessorCall(name="Fails", params={"at": 3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("stages") / "model")


def test_embeddings_and_logits_processors(folder: Path):
    """Rows of a picture, of the decoder's layers too, and of a prompt; and a processor that fails is the request's."""
    asked = conversations()[:4]
    prompt = EmbedsPrompt(embeds=read_input_embeds(torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))))
    answers = []
    for size in (1, 2):
        with LLM(str(folder), pp_size=size, enable_mm_embeds=True, logits_processors=PROCESSORS, **SETTINGS) as llm:
            rows = our_rows(llm, picture(2, 77, 131))
            forbidden = llm.chat_batch(asked, GREEDY, num_logprobs=2, logits_processors=[FORBID])
            assert all(len(set(one.token_ids)) == 8 for one in forbidden)
            with pytest.raises(EngineError, match="the logits processor 'Fails' failed: RuntimeError"):
                llm.chat(asked[1], GREEDY, logits_processors=[FAILS])
            given = llm.chat(with_parts("Look:", encoded(rows), "What is this?"), GREEDY, num_logprobs=2)
            answers.append([*forbidden, given, *llm.generate([prompt], GREEDY, num_logprobs=2)])
            stats = llm.stats()
            assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
    assert_alike(*answers)


def test_one_that_is_aborted_in_the_midst_leaves_nothing_and_others_go_on(folder: Path):
    settings = {**SETTINGS, "media_processes": 0}

    def request(name: str, tokens: int) -> GenerateReqInput:
        sampling = SamplingOverrides(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        return GenerateReqInput(
            request_id=name, prompt=TextPrompt(text=f"{name}: count the shapes"), sampling_params=sampling
        )

    async def whole(engine: AsyncLLM, name: str) -> str:
        return "".join([choice.output.text async for choice in engine.generate(request(name, 60))])

    async def scenario(engine: AsyncLLM) -> list[str]:
        others = [asyncio.ensure_future(whole(engine, name)) for name in ("first", "second")]
        async with aclosing(engine.generate(request("aborted", 900))) as outputs:
            await anext(outputs)
            assert await engine.abort("aborted") == ["aborted"]
            with pytest.raises(RequestAbortedError):
                async for _ in outputs:
                    pass
        async with aclosing(engine.generate(request("left", 900))) as outputs:
            await anext(outputs)
        texts = await asyncio.gather(*others)
        while (stats := await engine.stats()).num_running_reqs:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        assert stats is not None
        assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
        assert stats.req_pool_free == stats.req_pool_total
        return texts

    found = []
    for size in (1, 2):
        args = EngineArgs(model=str(folder), pp_size=size, **settings)
        engine = AsyncLLM(args, StageLimits(), joined=False, max_pending=8)
        try:
            found.append(asyncio.run(asyncio.wait_for(scenario(engine), 60)))
        finally:
            engine.close()
    assert found[0] == found[1]
