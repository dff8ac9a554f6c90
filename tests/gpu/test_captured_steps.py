"""Captured decode steps under a load: batches that grow and shrink, in float32 against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_answers import TOLERANCE, engine
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Reference, assert_equal_answers, conversations
from vlmserve import SamplingOverrides
from vlmserve.executor.cuda_graphs import DecodeGraphs
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
