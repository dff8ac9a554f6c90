"""Checkpoints whose contexts were made longer, against transformers: texts and pictures, behind the context that they
were trained for and before it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Answer, Reference, ask, assert_equal_answers, conversations, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.config.model_path import check_model
from vlmserve_common.errors import BadRequestError, SettingsError

NEW = 12
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
WORDS = "How many red circles are there on the left side of the blue square? "
TRAINED = 256
YARN = {"rope_type": "yarn", "factor": 4.0}
# each scaling, and the context that it makes of 256
SCALINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "published YaRN": ("qwen3_vl", {**YARN, "original_max_position_embeddings": TRAINED}, 1024),
    "YaRN as Qwen2.5-VL names it": ("qwen2_5_vl", {"type": "yarn", "factor": 3}, 768),
    "YaRN with its own factors": ("qwen2_vl", {**YARN, "attention_factor": 1.3, "beta_fast": 5}, 1024),
    "YaRN of a part of the head": ("qwen3_5", {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}, 1024),
    "linear": ("qwen2_5_vl", {"type": "linear", "factor": 2.5}, 640),
    "llama3": ("qwen3_vl", {"type": "llama3", "factor": 3, "low_freq_factor": 1, "high_freq_factor": 4}, 768),
    "dynamic": ("qwen2_vl", {"type": "dynamic", "factor": 4.0}, 256),
}


@dataclass(frozen=True)
class Scaled:
    folder: Path
    context: int
    asked: list
    wanted: list[Answer]


@pytest.fixture(scope="module", params=SCALINGS)
def scaled(request, tmp_path_factory) -> Scaled:
    family, scaling, context = SCALINGS[request.param]
    folder = make_checkpoint(family, tmp_path_factory.mktemp(family))
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    name = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    kept = {key: value for key, value in text[name].items() if key not in ("type", "rope_type")}
    text |= {name: {**kept, **scaling}, "max_position_embeddings": TRAINED}
    (folder / "config.json").write_text(json.dumps(config))
    asked = [*conversations()[:4]]
    if context > TRAINED:
        asked += [ask(WORDS * 16), ask(picture(5, 300, 300), WORDS * 12, picture(1, 96, 64), "What is this?")]
    reference = Reference(folder)
    wanted = [reference.answer(messages, NEW) for messages in asked]
    assert max(want.prompt_tokens for want in wanted) > (TRAINED if context > TRAINED else 0)
    return Scaled(folder, context, asked, wanted)


@pytest.mark.parametrize("settings", [{"chunked_prefill_size": 16, "page_size": 4}, {}], ids=["chunks", "whole"])
def test_equals_transformers(scaled, settings):
    with LLM(str(scaled.folder), num_threads=1, **settings) as llm:
        for _ in range(2):  # again, with cached prefixes
            done = llm.chat_batch(scaled.asked, GREEDY, num_logprobs=1)
            for got, want in zip(done, scaled.wanted, strict=True):
                assert_equal_answers(got, want)
        assert done[-1].cached_tokens > 0


def test_the_context_is_as_long_as_the_scaling_makes_it(scaled):
    check_model(scaled.folder, scaled.context)
    with pytest.raises(SettingsError, match=f"the model was made for {scaled.context} tokens"):
        check_model(scaled.folder, scaled.context + 1)
    with LLM(str(scaled.folder), num_threads=1) as llm:
        long = replace(GREEDY, max_new_tokens=scaled.context - scaled.wanted[0].prompt_tokens)
        assert len(llm.chat(scaled.asked[0], long).token_ids) == long.max_new_tokens
        with pytest.raises(BadRequestError, match=f"the context of {scaled.context} tokens"):
            llm.chat(scaled.asked[0], replace(long, max_new_tokens=long.max_new_tokens + 1))
