"""Captured decode steps under a load: batches that grow and shrink, in float32 against transformers."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gpu.asking import async_engine, some_at_a_time
from tests.gpu.test_answers import TOLERANCE, engine
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Reference, assert_equal_answers, conversations
from vlmserve import SamplingOverrides
from vlmserve.commands.bench.checkpoints import SHAPES, small, write_folder
from vlmserve.executor.cuda_graphs import DecodeGraphs
from vlmserve.frontend.request_builder import GenerateReqInput, TokensPrompt
from vlmserve.models.attention.base import ForwardBatch

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests of each step that is replayed."""
    run, noted = DecodeGraphs.run, []

    def noting(graphs: DecodeGraphs, forward_batch: ForwardBatch, size: int) -> torch.Tensor:
        noted.append(len(forward_batch.extend_lens))
        return run(graphs, forward_batch, size)

    monkeypatch.setattr(DecodeGraphs, "run", noting)
    return noted


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("sizes", [None, "1,3,5"])
def test_answers_of_captured_steps_are_those_of_transformers(tiny, cuda, replays, backend, sizes):
    """Batches grow and shrink, are padded, and outgrow what was captured."""
    asked = conversations()
    reference = Reference(tiny)
    wanted = [reference.answer(messages, 12) for messages in asked]
    with engine(tiny, cuda, dtype="float32", attention_backend=backend, cuda_graph_bs=sizes) as llm:
        for count in (1, 2, len(asked), 4):
            answers = llm.chat_batch(asked[:count], GREEDY, num_logprobs=2)
            for got, want in zip(answers, wanted, strict=False):
                assert_equal_answers(got, want, TOLERANCE)
        assert {1, 2, 4} <= set(replays)
        assert (len(asked) in replays) is (sizes is None), "larger steps than were captured are launched"


def test_tokens_are_the_same_with_and_without(tmp_path, cuda, replays):
    """Bfloat16, random requests that come and go, 64 at a time."""
    folder = write_folder(tmp_path, small(SHAPES["8b"]))
    with_graphs = asyncio.run(tokens_of(folder, cuda, disable_cuda_graph=False))
    assert len(set(replays)) > 20
    replays.clear()
    without = asyncio.run(tokens_of(folder, cuda, disable_cuda_graph=True))
    assert not replays
    same = sum(a == b for a, b in zip(with_graphs, without, strict=True))
    assert same >= 0.95 * len(without), "16 bits: near ties may fall either way where products are padded"


async def tokens_of(folder: Path, device: torch.device, **settings: object) -> list[tuple[int, ...]]:
    random = torch.Generator().manual_seed(0)
    limits = {"load_format": "dummy", "dtype": "bfloat16", "max_running_requests": 64, "max_total_tokens": 8192}
    async with async_engine(folder, device, **limits | settings) as llm:

        async def ask(number: int, ids: list[int], tokens: int) -> tuple[int, ...]:
            sampling = SamplingOverrides(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
            request = GenerateReqInput(request_id=f"r{number}", prompt=TokensPrompt(ids=tuple(ids)), sampling=sampling)
            return tuple([token async for choice in llm.generate(request) for token in choice.output.token_ids])

        asked = []
        for number in range(160):
            length, tokens = (int(torch.randint(1, most, (), generator=random)) for most in (200, 40))
            asked.append(partial(ask, number, torch.randint(0, 1600, (length,), generator=random).tolist(), tokens))
        return await some_at_a_time(64, asked)
