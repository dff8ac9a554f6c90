"""Qwen4Exp where it differs from other hybrid models: guesses, given embeddings, and what it does not support."""

import dataclasses

import numpy as np
import pytest

from tests.tiny_checkpoints import STREAMED, make_checkpoint
from tests.vlmserve.reference import Reference, ask, assert_equal_answers, picture
from tests.vlmserve.test_guesses import FOUR, Knowing
from vlmserve import LLM, EmbedsPrompt, SamplingOverrides, read_input_embeds
from vlmserve_common.errors import BadRequestError, CheckpointError, EngineError

WORDS = "How many red circles are there on the left side of the blue square? "
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=60)  # an end may come at any time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(STREAMED, tmp_path_factory.mktemp(STREAMED), shards=3)


@pytest.fixture(scope="module")
def known(folder):
    """Conversations that are longer than the budget, some by far, and what transformers answers."""
    reference = Reference(folder)
    asked = [
        ask(WORDS * 4, picture(1, 96, 64), "What is this?"),
        ask("Name a colour."),
        ask(WORDS * 7),
        ask(picture(2, 200, 300), "Is <|endoftext|> here?"),
    ]
    return asked, [reference.answer(messages, GREEDY.max_new_tokens) for messages in asked]


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 16, "mamba_track_interval": 64, "page_size": 1},
        {"max_total_tokens": 384, "page_size": 4, "schedule_conservativeness": 0.01, "mamba_track_interval": 64},
        {"cpu_kernels": "off", "chunked_prefill_size": 48},
    ],
)
def test_guesses_change_no_answer(folder, known, settings):
    """Some are right and some wrong; chunks, cached prefixes and requests that are taken back come between."""
    asked, wanted = known
    with LLM(str(folder), num_threads=1, speculative_algorithm="ngram", **FOUR, **settings) as llm:
        scheduler = llm.engine.loop.schedulers[0]
        scheduler._guesser._drafter = Knowing(wanted)
        for got, want in zip(llm.chat_batch(asked * 3, GREEDY, num_logprobs=1), wanted * 3, strict=True):
            assert_equal_answers(got, want)
        stats = llm.stats()
        assert stats.steps.guesses.right > 50
        assert bool(stats.retracted_total) == ("max_total_tokens" in settings)
        assert scheduler.kv.states.held == 0


def test_a_prompt_of_embeddings_is_refused(folder):
    with LLM(str(folder), num_threads=1) as llm:
        rows = read_input_embeds(np.zeros((4, 64), dtype=np.float32))
        with pytest.raises(BadRequestError, match="input_embeds cannot be the prompt of this model: it looks up"):
            llm.generate([EmbedsPrompt(embeds=rows)], dataclasses.replace(GREEDY, max_new_tokens=2))


@pytest.mark.parametrize(
    ("settings", "error", "complaint"),
    [
        ({"kv_cache_dtype": "int8"}, EngineError, "kv_cache_dtype is int8: the KV cache of qwen4_exp has the index"),
        ({"speculative_algorithm": "mtp"}, CheckpointError, "there are no tensors mtp.layers"),
        (
            {"speculative_algorithm": "eagle3", "speculative_draft_model_path": "itself"},
            EngineError,
            "speculative_algorithm is eagle3: EAGLE-3 heads read the input of single layers",
        ),
    ],
)
def test_what_it_does_not_support_is_refused_at_the_start(folder, settings, error, complaint):
    if "speculative_draft_model_path" in settings:
        settings = {**settings, "speculative_draft_model_path": str(folder)}
    with pytest.raises(error, match=complaint):
        LLM(str(folder), num_threads=1, **settings)
