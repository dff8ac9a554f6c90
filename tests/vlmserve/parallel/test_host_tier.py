"""Prefixes that go to host memory and come back, where ranks or replicas hold the KV: each copies its own part."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoints import HYBRID, MOE, make_checkpoint
from tests.vlmserve.parallel.sharing import GREEDY, SETTINGS, assert_alike
from tests.vlmserve.reference import conversations
from tests.vlmserve.server_process import serving
from vlmserve import LLM
from vlmserve.commands.offline.llm import Completion

TIERS = {"enable_hierarchical_cache": True, "hicache_size_gib": 0.01}
TP, PP = {"tp_size": 2}, {"pp_size": 2}
GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
SMALL = SETTINGS | {"max_total_tokens": 240}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Completion]]]:
    """A family's folder, and what one process without a prefix cache answers."""

    @cache
    def of(family: str) -> tuple[Path, list[Completion]]:
        folder = make_checkpoint(family, tmp_path_factory.mktemp("alone") / "model")
        with LLM(str(folder), dtype="float32", disable_radix_cache=True, **SETTINGS) as llm:
            return folder, list(llm.chat_batch(conversations(), GREEDY, num_logprobs=2))

    return of


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_vl", TP),
        ("qwen3_vl", PP),
        *(
            pytest.param(family, settings, marks=pytest.mark.slow)
            for family, settings in [
                ("qwen2_5_vl", TP | PP),
                (MOE, TP | {"ep_size": 2}),
                (MOE, GROUPS),
                ("qwen3_vl", GROUPS),
                ("qwen3_vl", TP | {"speculative_algorithm": "ngram"}),
                ("qwen3_vl", PP | {"disable_overlap_schedule": True}),
            ]
        ),
    ],
)
def test_every_rank_brings_back_its_own_part_of_a_prefix(family: str, settings: dict[str, Any], alone):
    folder, expected = alone(family)
    asked = conversations()
    with LLM(str(folder), dtype="float32", **SMALL | TIERS | settings) as llm:
        for _ in range(3):
            assert_alike(expected, llm.chat_batch(asked, GREEDY, num_logprobs=2))
        found = [llm.chat(one, GREEDY, num_logprobs=2) for one in asked]  # one after the other
    assert_alike(expected, found)
    prompts = sum(one.prompt_tokens for one in found)
    assert prompts > 2 * SMALL["max_total_tokens"]
    assert sum(one.cached_tokens for one in found) > 0.9 * prompts


@pytest.mark.slow
def test_replicas_have_a_tier_each(alone, tmp_path: Path):
    folder, _ = alone("qwen3_vl")
    flags = ["--dp-size=2", "--enable-hierarchical-cache", "--hicache-size-gib=0.01", "--max-total-tokens=1024"]
    prompts = [f"{number} " + " ".join(str(number * other) for other in range(150)) for number in range(1, 6)]
    with serving(tmp_path, *flags, model=folder) as server, server.client() as client:

        def answer(prompt: str, replica: int) -> tuple[str, int]:
            reply = client.completions.create(
                model="tiny",
                prompt=prompt,
                temperature=0,
                max_tokens=8,
                extra_body={"ignore_eos": True, "data_parallel_rank": replica},
            )
            return reply.choices[0].text, reply.usage.prompt_tokens_details.cached_tokens

        first, again = ([[answer(one, at) for one in prompts] for at in range(2)] for _ in range(2))
    assert [text for text, _ in first[0]] == [text for text, _ in first[1]]
    for before, after in zip(first, again, strict=True):
        assert [text for text, _ in before] == [text for text, _ in after]
        assert sum(tokens for _, tokens in before) == 0
        assert all(tokens > 300 for _, tokens in after)


def test_hybrid_models_say_that_they_have_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = make_checkpoint(HYBRID, tmp_path / "model")
    with LLM(str(folder), **SMALL | TIERS | TP) as llm:
        assert llm.chat("Name a colour.", GREEDY).token_ids
    assert "--enable-hierarchical-cache is off" in caplog.text
