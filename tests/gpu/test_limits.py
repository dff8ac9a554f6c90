"""Requests that just fit: the longest there can be, and a pool with room for one page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_answers import TOLERANCE, engine
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Reference, ask, assert_equal_answers, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve_common.errors import BadRequestError

NEW = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("tiny"))


def greedy(tokens: int) -> SamplingOverrides:
    return SamplingOverrides(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)


def assert_balanced(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
    assert stats.req_pool_free == stats.req_pool_total


@pytest.mark.parametrize("chunk", [-1, 48])
def test_a_request_of_exactly_the_longest_length(tiny, device, chunk):
    conversation = ask(picture(2, 77, 131), "Describe it in detail, please. " * 5)
    wanted = Reference(tiny).answer(conversation, NEW)
    settings = {"dtype": "float32", "chunked_prefill_size": chunk, "max_model_len": wanted.prompt_tokens + NEW}
    with engine(tiny, device, **settings) as llm:
        assert llm.info.max_req_len == wanted.prompt_tokens + NEW
        for _ in range(2):
            done = llm.chat(conversation, greedy(NEW), num_logprobs=2)
            assert_equal_answers(done, wanted, TOLERANCE)
            assert (done.finish_reason, len(done.token_ids)) == ("length", NEW)
        unlimited = llm.chat(conversation, SamplingOverrides(temperature=0.0, ignore_eos=True))
        assert unlimited.token_ids == done.token_ids, "as far as there is room"
        with pytest.raises(BadRequestError, match=f"{wanted.prompt_tokens + NEW}"):
            llm.chat(conversation, greedy(NEW + 1))
        assert_balanced(llm)


def test_a_pool_with_room_for_one_page(tiny, device):
    """The least that the engine starts with: two pages, one of which a request may fill."""
    conversations = [ask(f"Name {number} colours.") for number in range(6)]
    reference = Reference(tiny)
    with engine(tiny, device, dtype="float32", page_size=64, max_total_tokens=128) as llm:
        assert llm.info.max_req_len == 64
        answers = llm.chat_batch(conversations, greedy(NEW), num_logprobs=2)
        for conversation, answer in zip(conversations, answers, strict=True):
            assert_equal_answers(answer, reference.answer(conversation, NEW), TOLERANCE)
        assert_balanced(llm)
