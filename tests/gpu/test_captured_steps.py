"""Captured decode steps under a load: batches that grow and shrink, in float32 against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_answers import TOLERANCE, engine
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Reference, assert_equal_answers, conversations
from vlmserve import LLM, SamplingOverrides
from vlmserve.commands.bench.gpu.shapes import SHAPES, small, write_folder
from vlmserve.engine.build import build_loop
from vlmserve.ipc.messages import SamplingParams, TokenizedGenerateReqInput

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("tiny"))


def replays(llm: LLM) -> list[int]:
    """Requests of each step that is replayed from now on."""
    graphs, noted = llm.engine.runner._graphs, []
    assert graphs is not None, "decode steps were not captured"
    run = graphs.run

    def noting(forward_batch, size):
        noted.append(len(forward_batch.extend_lens))
        return run(forward_batch, size)

    graphs.run = noting
    return noted


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("sizes", [None, "1,3,5"])
def test_answers_of_captured_steps_are_those_of_transformers(tiny, cuda, backend, sizes):
    """Batches grow and shrink, are padded, and outgrow what was captured."""
    asked = conversations()
    reference = Reference(tiny)
    wanted = [reference.answer(messages, 12) for messages in asked]
    with engine(tiny, cuda, dtype="float32", attention_backend=backend, cuda_graph_bs=sizes) as llm:
        noted = replays(llm)
        for count in (1, 2, len(asked), 4):
            answers = llm.chat_batch(asked[:count], GREEDY, num_logprobs=2)
            for got, want in zip(answers, wanted, strict=False):
                assert_equal_answers(got, want, TOLERANCE)
        assert {1, 2, 4} <= set(noted)
        assert (len(asked) in noted) is (sizes is None), "larger steps than were captured are launched"


def test_tokens_are_the_same_with_and_without(tmp_path, cuda):
    """Bfloat16, random requests that come and go, 64 at a time."""
    folder = write_folder(tmp_path, small(SHAPES["8b"]))
    settings = {"load_format": "dummy", "dtype": "bfloat16", "max_running_requests": 64}
    found = []
    for off in (False, True):
        with engine(folder, cuda, disable_cuda_graph=off, **settings) as llm:
            if not off:
                noted = replays(llm)
            found.append(tokens_of(llm))
    assert len(set(noted)) > 20
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 0.95 * len(found[0]), "16 bits: near ties may fall either way where products are padded"


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    random = torch.Generator().manual_seed(0)
    answers = {}

    def take(output) -> None:
        for one in output.outputs:
            answers[one.rid] = (*answers.get(one.rid, ()), *one.token_ids)

    loop = build_loop(llm.args, llm.engine.runner, llm.engine.info, take)
    for number in range(160):
        length, tokens = (int(torch.randint(1, most, (), generator=random)) for most in (200, 40))
        ids = torch.randint(0, 1600, (length,), generator=random).numpy()
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        loop.handle(TokenizedGenerateReqInput(rid=f"r{number:03}", input_ids=ids, sampling_params=sampling))
        loop.step()
    while not loop.is_idle():
        loop.step_or_wait()
    loop.close()
    return [answers[rid] for rid in sorted(answers)]
