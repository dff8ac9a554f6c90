"""Guesses of a smaller model, with a tower and without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.text_checkpoints import make_text_checkpoint
from tests.tiny_checkpoints import HYBRID, make_checkpoint
from tests.vlmserve.known_guesses import (
    DRAFTS,
    FOUR,
    GREEDY,
    GROUPS,
    MORE_SHARED,
    NEW,
    PP,
    SMALL,
    Known,
    agree,
    check_many,
    check_shared,
    questions,
)
from tests.vlmserve.reference import Reference, ask, assert_equal_answers, picture
from tests.vlmserve.server_process import SAMPLES, media_part, serving
from vlmserve import LLM, SamplingOverrides, TokensPrompt
from vlmserve_common.errors import CheckpointError


def guessing(folder: Path, **settings) -> dict:
    return {"speculative_algorithm": "draft_model", "speculative_draft_model_path": str(folder)} | settings


class TextReference:
    """What a model without a tower makes of the tokens of a conversation."""

    def __init__(self, folder: Path, target: Reference) -> None:
        self.model, self._target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), target

    @torch.no_grad()
    def logprobs(self, messages: list[dict], continuation: list[int]) -> np.ndarray:
        ids = [*self._target._inputs(messages)["input_ids"][0].tolist(), *continuation]
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


class SeeingReference(Reference):
    def logprobs(self, messages: list[dict], continuation: list[int]) -> np.ndarray:
        return self.forward(messages, continuation).logprobs


def known(target: Reference, draft: TextReference | SeeingReference) -> list[Known]:
    found = []
    for messages in questions():
        answer, rows, margins = target.answer(messages, NEW), [], []
        for index in range(NEW - 1):
            so_far = answer.token_ids[: index + 1]
            for _ in range(DRAFTS):
                last = draft.logprobs(messages, so_far)[-1]
                second, best = np.argpartition(last, -2)[-2:]
                so_far = [*so_far, int(np.argmax(last))]
                margins.append(abs(float(last[best] - last[second])))
            rows += so_far[-DRAFTS:]
        shaped = torch.tensor(rows).view(-1, DRAFTS), torch.tensor(margins).view(-1, DRAFTS)
        found.append(Known(messages, answer, *shaped))
    return found


@pytest.fixture(scope="module", params=["seeing", "blind", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def pair(request, tmp_path_factory):
    base, family = tmp_path_factory.mktemp(request.param), "qwen2_5_vl" if request.param == "qwen2_5_vl" else "qwen3_vl"
    folder = make_checkpoint(family, base / "model")
    draft = make_checkpoint(family, base / "draft", seed=3, deepstack=(0,))
    target = Reference(folder)
    if request.param == "blind":
        draft = make_text_checkpoint("qwen3", base / "text", seed=3)
        return folder, draft, known(target, TextReference(draft, target))
    return folder, draft, known(target, SeeingReference(draft))


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 48, "page_size": 4},
        pytest.param({"chunked_prefill_size": 16, "attention_backend": "torch"}, marks=pytest.mark.slow),
    ],
)
def test_guesses_are_the_reference_s(pair, settings):
    """Behind any number of right ones, steps without any, pictures, and cached prefixes."""
    folder, draft, cases = pair
    case, seen = cases[0], 0
    with LLM(str(folder), num_threads=1, **guessing(draft, **FOUR, **settings)) as llm:
        drafter, guesser = llm._runner._drafter, llm.engine.loop.schedulers[0]._guesser
        plain = drafter.draft

        def propose(req):
            """So many right ones, and the rest to be made; none now and then."""
            index = len(req.output_ids)
            right = case.answer.token_ids[index : index + index % 5]
            return () if index % 11 in (5, 6, 7) else (*right, *[-1] * (DRAFTS - len(right)))

        def check(step, inputs, rounds):
            nonlocal seen
            plain(step, inputs, rounds)
            index, given = inputs.drafts.host_lens[0] - case.answer.prompt_tokens, inputs.drafts.given.tensor >= 0
            guesses = step.input_ids[inputs.drafts.tokens.tensor][~given].tolist()
            seen += agree(case, index + int(given.sum()), guesses)

        drafter.draft, guesser._drafter.propose = check, propose
        for case in [*cases, *cases[::-1]]:
            assert_equal_answers(llm.chat(case.messages, GREEDY, num_logprobs=0), case.answer)
        stats = llm.stats().steps
        assert stats.prefix_hits_total
        assert seen > 150


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 48, **SMALL},
        {
            "speculative_num_draft_tokens": "auto",
            "enable_hierarchical_cache": True,
            "hicache_size_gib": 0.01,  # small machines have no 4 GiB beside other tests
            "max_total_tokens": 512,
        },
        pytest.param({"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.slow),
    ],
)
def test_answers_of_many_at_a_time(pair, settings):
    folder, draft, cases = pair
    check_many(folder, cases, settings, **guessing(draft))


@pytest.mark.parametrize("settings", [PP, GROUPS, *MORE_SHARED])
def test_processes_that_share_the_model(pair, settings):
    folder, draft, cases = pair
    check_shared(folder, cases, settings, **guessing(draft))


@pytest.mark.parametrize("settings", [{"chunked_prefill_size": 48}, {"disable_radix_cache": True}])
def test_a_model_that_guesses_for_itself_is_always_right(settings, tmp_path):
    """With pictures, many at a time, in chunks or whole, and behind cached prefixes."""
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    with LLM(str(folder), num_threads=1, max_total_tokens=2048, **guessing(folder, **FOUR, **settings)) as llm:
        for _ in range(2):
            llm.chat_batch(questions(), GREEDY)
        stats = llm.stats().steps
        assert stats.guesses.right > 0.99 * stats.guesses.tokens > 200
        assert bool(stats.prefix_hits_total) != ("disable_radix_cache" in settings)


def test_it_catches_up_with_cached_answers_that_were_made_without_guesses(tmp_path):
    """In slots, too, that had its KV of other tokens before, and before a picture."""
    folder, settings = make_checkpoint("qwen3_vl", tmp_path / "model"), {"max_total_tokens": 512, "page_size": 1}
    random = SamplingOverrides(temperature=2.0, seed=1, ignore_eos=True)
    with LLM(str(folder), num_threads=1, **guessing(folder, **FOUR, **settings)) as llm:
        drafter, tokenizer = llm.engine.loop.schedulers[0]._guesser._drafter, llm.engine.stage.tokenizer
        plain = drafter.propose
        llm.generate([TokensPrompt(ids=(*range(20),))], replace(random, max_new_tokens=490))
        drafter.propose = lambda req: ()
        digits = tuple(tokenizer.encode("0123456789"))  # which are a token each, also in the next prompt
        turn = {"role": "user", "content": "Count!"}
        told = llm.chat([turn], replace(random, max_new_tokens=100, allowed_token_ids=digits))
        drafter.propose = plain
        before = llm.stats().steps
        [then] = ask(picture(1, 256, 256), "And now?")
        llm.chat([turn, {"role": "assistant", "content": told.text}, then], GREEDY)
        after = llm.stats().steps
        assert after.prefix_hits_total - before.prefix_hits_total > 100
        drafts, right = after.guesses.tokens - before.guesses.tokens, after.guesses.right - before.guesses.right
        assert right == drafts >= 30


def test_encoder_processes_have_both_towers(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    settings = guessing(folder, **FOUR, encoder_dp_size=1)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with serving(tmp_path / "run", *flags, model=folder) as server, server.client() as client:
        content = [media_part("image", (SAMPLES / "shapes.png").read_bytes()), {"type": "text", "text": "What?"}]
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=60
        )
        figures = server.figures()
        drafts, right = (figures[f"spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
        assert right > 0.9 * drafts > 20


def test_a_model_that_cannot_guess_for_another_is_refused(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    for family, message in (
        ("qwen2_5_vl", "a qwen2_5_vl cannot guess for a qwen3_vl, whose pictures have other tokens"),
        (HYBRID, "a qwen3_5 cannot guess for others, as it has recurrent layers"),
    ):
        other = make_checkpoint(family, tmp_path / family)
        with pytest.raises(CheckpointError, match=message):
            LLM(str(folder), **guessing(other))
    other = make_checkpoint("qwen3_vl", tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"!": 0', '"~~": 0'))
    with pytest.raises(
        CheckpointError, match=r"other cannot guess for .*model: its token \d+ is b'.*', there it is b'"
    ):
        LLM(str(folder), **guessing(other))
