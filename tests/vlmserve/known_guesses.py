"""Guessed tokens that are known beforehand, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.vlmserve.reference import ask, assert_equal_answers, conversations, picture
from vlmserve import LLM, SamplingOverrides

NEW, DRAFTS = 40, 4
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
WORDS = "How many red circles are there on the left side of the blue square? "
FOUR = {"speculative_num_draft_tokens": DRAFTS}  # always so many
PP = {"pp_size": 2}
GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "load_balance_method": "round_robin"}
SMALL = {"max_total_tokens": 384, "page_size": 4, "schedule_conservativeness": 0.01}
HYBRID_CHUNKS = [
    {"chunked_prefill_size": 112, "page_size": 16, "mamba_track_interval": 64},
    pytest.param({"chunked_prefill_size": 16, "page_size": 1, "attention_backend": "torch"}, marks=pytest.mark.slow),
]
MORE_SHARED = [
    pytest.param(one, marks=pytest.mark.slow)
    for one in ({"tp_size": 2}, PP | {"tp_size": 2, "disable_overlap_schedule": True}, GROUPS | {"tp_size": 4})
]


@dataclass
class Known:
    """A conversation with its greedy answer. drafts: int64 [answer tokens - 1, DRAFTS], what is guessed once a token
    of the answer is known; margins: of each over the next likely token. keys: of the entries."""

    messages: list
    answer: object
    drafts: torch.Tensor
    margins: torch.Tensor
    keys: torch.Tensor | None = None


def agree(case: Known, index: int, guesses: list[int]) -> int:
    """Return how many guesses are the reference's, once token `index` of the answer is known: all but at a tie."""
    for number, (own, want) in enumerate(zip(guesses, case.drafts[index].tolist(), strict=False)):
        if own != want:
            assert case.margins[index, number] < 1e-3, (index, guesses, case.drafts[index])
            return number
    return len(guesses)


def questions() -> list[list[dict]]:
    """Conversations with and without pictures, one of which begins as another does."""
    return [
        *conversations()[1:7:2],
        ask(WORDS * 2, picture(1, 256, 256), WORDS * 2),
        ask(WORDS, picture(1, 256, 256), "Count."),
    ]


def check_guesses(llm: LLM, cases: list[Known], layer: int) -> None:
    """Ask twice for each answer. All guesses must be those known, behind any number of right ones, in pictures'
    company, and behind cached prefixes; and so must keys in a layer of the cache."""
    drafter, case, seen = llm._runner._drafter, cases[0], 0
    plain = drafter.draft

    def draft(step, inputs, rounds):
        nonlocal seen
        plain(step, inputs, rounds)
        tokens, index = inputs.drafts.tokens.tensor, inputs.drafts.host_lens[0] - case.answer.prompt_tokens
        seen += agree(case, index, step.input_ids[tokens].tolist())
        truth = torch.tensor(case.answer.token_ids)[index + 1 :][: len(tokens)]
        truth[index % 5 :] += 1  # so many are right
        step.input_ids[tokens] = truth % 448

    drafter.draft = draft
    kv, keys = llm.engine.loop.schedulers[0].kv, llm._runner.kv_cache.layers[layer].keys
    plain_share = kv.share

    def share(req):  # which replaces KV that is there already
        slots = kv.slots(req, 1, req.kv_committed_len)
        torch.testing.assert_close(keys[slots], case.keys[: len(slots)], rtol=1e-3, atol=1e-4)
        plain_share(req)

    kv.share = share
    for case in [*cases, *cases[::-1]]:
        assert_equal_answers(llm.chat(case.messages, GREEDY, num_logprobs=0), case.answer)
    stats = llm.stats().steps
    assert stats.prefix_hits_total
    assert 0.2 < stats.guesses.right / stats.guesses.tokens < 0.8
    assert seen > 0.9 * stats.guesses.tokens


def check_many(folder: Path, cases: list[Known], settings: dict, **guessing: str) -> None:
    """Ask for random answers, many at a time and twice. Guesses must change none of them."""
    random = SamplingOverrides(temperature=0.8, seed=5, max_new_tokens=60)
    asked = [case.messages for case in cases] * 2
    same = {name: value for name, value in settings.items() if name == "kv_cache_dtype"}
    with LLM(str(folder), num_threads=1, **same) as plain:
        wanted = plain.chat_batch(asked, random)
    with LLM(str(folder), num_threads=1, **guessing, **FOUR | settings) as llm:
        for _ in range(2):
            done = llm.chat_batch(asked, random)
            assert [one.token_ids for one in done] == [one.token_ids for one in wanted]
        assert llm.stats().steps.guesses.steps > 20
        assert bool(llm.stats().retracted_total) == (settings.get("max_total_tokens") == 384)


def check_shared(folder: Path, cases: list[Known], settings: dict, **guessing: str) -> None:
    """Ask processes that share a model. Random answers of many at a time must be those of one process without guesses.
    Of greedy ones, together and alone, with other groups idle, all guesses must be those known."""
    random = SamplingOverrides(temperature=0.8, seed=5, max_new_tokens=30)
    asked, seen, made = [case.messages for case in cases], 0, 0
    by_length = {case.answer.prompt_tokens: case for case in cases}
    assert len(by_length) == len(cases)
    with LLM(str(folder), num_threads=1) as plain:
        wanted = plain.chat_batch(asked * 2, random)
    with LLM(str(folder), num_threads=1, chunked_prefill_size=48, **guessing, **FOUR, **settings) as llm:
        done = llm.chat_batch(asked * 2, random)
        assert [one.token_ids for one in done] == [one.token_ids for one in wanted]

        def checking(plain):
            def process(batch, result):
                nonlocal seen, made
                guesses = iter([] if result.drafts is None else result.drafts.tolist())
                for part in batch.reqs:
                    own, length = [next(guesses) for _ in part.drafts], part.req.prompt_len
                    if own:
                        seen, made = seen + agree(by_length[length], part.start - length, own), made + len(own)
                return plain(batch, result)

            return process

        for scheduler in llm.engine.loop.schedulers:
            scheduler.process_batch_result = checking(scheduler.process_batch_result)
        answers = [*llm.chat_batch(asked, GREEDY, num_logprobs=0), *llm.chat_batch(asked[:1], GREEDY, num_logprobs=0)]
        for answer, case in zip(answers, [*cases, cases[0]], strict=True):
            assert_equal_answers(answer, case.answer)
        assert seen > 0.9 * made > 100
