"""Layers whose tokens see the last tokens only, against transformers."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.text_checkpoints import make_text_checkpoint
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Reference, ask, assert_equal_answers, conversations, picture
from tests.vlmserve.test_text_models import ASKED, answer
from vlmserve import LLM, SamplingOverrides
from vlmserve_common.errors import CheckpointError

NEW = 12
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
WINDOW = 24
WORDS = "How many red circles are there on the left side of the blue square? "
SEEING = {
    "qwen2_vl": {"max_window_layers": 1},
    "qwen2_5_vl": {"max_window_layers": 0},
    # which layers they are is listed
    "listed": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


def sliding(folder: Path, **which) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": WINDOW, **which}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=[*SEEING, "qwen2", "qwen3"])
def known(request, tmp_path_factory):
    """A checkpoint, conversations, and what transformers answers."""
    folder, family = tmp_path_factory.mktemp(request.param), request.param
    if family not in SEEING:
        made = sliding(make_text_checkpoint(family, folder), max_window_layers=1)
        return made, ASKED, [answer(made, messages) for messages in ASKED]
    made = sliding(make_checkpoint("qwen2_vl" if family == "listed" else family, folder), **SEEING[family])
    asked = [*conversations()[:4], ask(picture(5, 300, 300), WORDS * 20, picture(1, 96, 64), "What is this?")]
    reference = Reference(made)
    return made, asked, [reference.answer(messages, NEW) for messages in asked]


SMALL = {"max_running_requests": 4, "max_total_tokens": 768, "schedule_conservativeness": 0.01, "max_step_s": 0.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 16, "page_size": 4},
        {},
        {"chunked_prefill_size": 48, "attention_backend": "torch", "page_size": 1},
        {"cpu_kernels": "off"},
        {"chunked_prefill_size": 16, "page_size": 1, **SMALL},
        {"chunked_prefill_size": 48, "page_size": 4, "speculative_algorithm": "ngram", **SMALL},
        {"chunked_prefill_size": 48, "attention_backend": "torch", "disable_radix_cache": True, **SMALL},
    ],
    ids=["chunks", "whole", "torch in chunks", "torch", "small", "small with guesses", "small without a cache"],
)
def test_equals_transformers(known, settings):
    folder, asked, wanted = known
    with LLM(str(folder), num_threads=1, **settings) as llm:
        for _ in range(2):  # again, with cached prefixes
            done = llm.chat_batch(asked, GREEDY, num_logprobs=1)
            for got, want in zip(done, wanted, strict=True):
                assert_equal_answers(got, want)
        assert ("disable_radix_cache" in settings) == all(got.cached_tokens == 0 for got in done)
        kv = llm.engine.loop.schedulers[0].kv
        assert kv.windows.size < kv.allocator.size


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, pytest.param({"pp_size": 2}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("known", ["qwen2_vl"], indirect=True)
def test_ranks_answer_as_one(known, sizes):
    folder, asked, wanted = known
    with LLM(str(folder), num_threads=1, chunked_prefill_size=16, page_size=4, **SMALL, **sizes) as llm:
        for _ in range(2):
            for got, want in zip(llm.chat_batch(asked, GREEDY, num_logprobs=1), wanted, strict=True):
                assert_equal_answers(got, want)
        assert llm.engine.loop.schedulers[0].kv.windows is not None


@pytest.mark.parametrize("known", ["qwen2_vl"], indirect=True)
def test_requests_that_are_taken_back_go_on(known):
    folder, _, _ = known
    reference, asked = Reference(folder), [ask(WORDS[: 8 + number]) for number in range(6)]
    settings = {**SMALL, "max_running_requests": 6, "max_total_tokens": 320, "chunked_prefill_size": 16, "page_size": 4}
    with LLM(str(folder), num_threads=1, **settings) as llm:
        done = llm.chat_batch(asked, replace(GREEDY, max_new_tokens=80, ignore_eos=False), num_logprobs=1)
        assert llm.stats().retracted_total
        assert llm.engine.loop.schedulers[0].kv.windows is not None
    for got, messages in zip(done, asked, strict=True):
        assert_equal_answers(got, reference.answer(messages, 80))


@pytest.mark.parametrize("first", [0, 1])
def test_a_long_answer_takes_no_more_than_its_window(tmp_path, caplog, first):
    """Of one request, and of those behind; if all layers have windows, and if most do."""
    folder = sliding(make_checkpoint("qwen2_vl", tmp_path), max_window_layers=first, max_position_embeddings=4096)
    long, settings = replace(GREEDY, max_new_tokens=2000), {"num_threads": 1, "chunked_prefill_size": 16}
    answers = []
    for requests in (2, 64):  # whose windows take as much as there is
        with (
            caplog.at_level(logging.INFO),
            LLM(str(folder), max_running_requests=requests, max_total_tokens=4096, **settings) as llm,
        ):
            answers.append([one.token_ids for one in llm.chat_batch([ask("Count."), ask(WORDS * 4)], long)])
            kv, cache = llm.engine.loop.schedulers[0].kv, llm._runner.kv_cache
            slots = [len(layer.keys) for layer in cache.layers]
            if requests == 2:
                assert kv.windows.size < 200
                assert slots == [4096 + 16] * first + [kv.windows.size + 16] * (3 - first)
                assert f"but {kv.windows.size} for the" in caplog.text
            else:
                assert kv.windows is None
                assert slots == [4096 + 16] * 3
                assert "also in layers with windows: windows of all requests take no less" in caplog.text
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]] == [2000, 2000]


def test_without_other_layers_there_is_room_for_all_contexts(tmp_path):
    folder = sliding(make_checkpoint("qwen2_vl", tmp_path), max_window_layers=0)
    with LLM(str(folder), num_threads=1, cpu_kv_cache_gib=0.02) as llm:
        assert llm.engine.loop.schedulers[0].kv.allocator.size == 64 * (1024 + 16)


def test_tiers_keep_all(known, caplog):
    folder, asked, wanted = known
    with (
        caplog.at_level(logging.INFO),
        LLM(str(folder), num_threads=1, enable_hierarchical_cache=True, hicache_size_gib=0.01) as llm,
    ):
        for got, want in zip(llm.chat_batch(asked, GREEDY, num_logprobs=1), wanted, strict=True):
            assert_equal_answers(got, want)
        assert llm.engine.loop.schedulers[0].kv.windows is None
    assert "layers with windows: --enable-hierarchical-cache" in caplog.text


def test_windows_behind_all_layers_are_none(tmp_path):
    """As some published checkpoints have them."""
    plain = make_checkpoint("qwen2_vl", tmp_path)
    with LLM(str(plain), num_threads=1) as llm:
        want = llm.chat(ask(WORDS * 4), GREEDY).token_ids
    with LLM(str(sliding(plain, max_window_layers=3)), num_threads=1) as llm:
        assert llm.chat(ask(WORDS * 4), GREEDY).token_ids == want


@pytest.mark.parametrize(
    ("family", "which", "message"),
    [
        ("qwen3_moe", {}, "use_sliding_window is true, which this family does not have"),
        ("qwen2", {"sliding_window": 0}, "sliding_window is 0, and must be above 0"),
        ("qwen2", {"max_window_layers": None}, "max_window_layers is missing"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "must be 3 of sliding_attention and full_attention"),
    ],
)
def test_windows_that_cannot_be(tmp_path, family, which, message):
    folder = make_text_checkpoint(family, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(sliding(folder, **which)))
