"""Models that read text only, against transformers, and what clients see of them."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.text_checkpoints import FAMILIES, make_text_checkpoint
from tests.tiny_checkpoints import write_safetensors
from tests.vlmserve.reference import Answer, ask, assert_equal_answers, picture
from tests.vlmserve.server_process import SAMPLES, media_part, serving
from vlmserve import LLM, SamplingOverrides
from vlmserve_common.errors import BadRequestError, CheckpointError, EngineError

NEW = 12
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
ASKED = [
    [{"role": "user", "content": "Name a colour."}],
    [{"role": "user", "content": "How many red circles are there on the left side? " * 4}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": "A disc."},
        {"role": "user", "content": "And this?"},
    ],
]


@torch.no_grad()
def answer(folder: Path, messages: list[dict]) -> Answer:
    """What transformers answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    logprobs, margins, length = [], [], ids.shape[1]
    for _ in range(NEW):
        last = model(ids).logits[0, -1].log_softmax(-1)
        best, second = last.topk(2).values.tolist()
        logprobs.append(best)
        margins.append(best - second)
        ids = torch.cat([ids, last.argmax().view(1, 1)], dim=1)
    return Answer(length, ids[0, length:].tolist(), logprobs, margins)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = make_text_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return folder, [answer(folder, messages) for messages in ASKED]


@pytest.mark.parametrize("settings", [{"chunked_prefill_size": 16, "page_size": 4}, {}], ids=["chunks", "whole"])
def test_equals_transformers(model, settings):
    folder, wanted = model
    with LLM(str(folder), num_threads=1, **settings) as llm:
        for _ in range(2):  # again, with cached prefixes
            done = llm.chat_batch(ASKED, GREEDY, num_logprobs=1)
            for got, want in zip(done, wanted, strict=True):
                assert_equal_answers(got, want)
        parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Name a ", "colour.")]}]
        assert_equal_answers(llm.chat(parts, GREEDY, num_logprobs=1), wanted[0])
        with pytest.raises(BadRequestError, match=r"messages\[0\].content\[1\]: the model reads text only"):
            llm.chat(ask("What is", picture(1, 96, 64)), GREEDY)
        assert_equal_answers(llm.chat(ASKED[0], GREEDY, num_logprobs=1), wanted[0])


def test_a_decoder_that_was_saved_without_its_head(tmp_path):
    folder = make_text_checkpoint("qwen3", tmp_path)
    want = answer(folder, ASKED[0])
    tensors = load_file(folder / "model.safetensors")
    write_safetensors(folder, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    with LLM(str(folder), num_threads=1) as llm:
        assert_equal_answers(llm.chat(ASKED[0], GREEDY, num_logprobs=1), want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder_dp_size": 1}, "no vision tower for model_type 'qwen3_moe', which reads text only"),
        ({"speculative_algorithm": "mtp"}, "this qwen3_moe has none"),
    ],
)
def test_settings_that_need_more_than_there_is(tmp_path, settings, message):
    folder = make_text_checkpoint("qwen3_moe", tmp_path)
    with pytest.raises((CheckpointError, EngineError), match=message):
        LLM(str(folder), num_threads=1, **settings)


def test_experts_whose_scores_do_not_add_up_are_refused(tmp_path):
    folder = make_text_checkpoint("qwen3_moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["norm_topk_prob"]  # which transformers reads as false
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="norm_topk_prob is false by default"):
        LLM(str(folder))


def test_a_server_answers_texts_and_refuses_pictures(tmp_path):
    folder = make_text_checkpoint("qwen2", tmp_path / "model")
    want = answer(folder, ASKED[0])
    with serving(tmp_path / "run", model=folder) as server, server.client() as client:
        asked = {"model": "tiny", "temperature": 0, "max_tokens": NEW, "extra_body": {"ignore_eos": True}}
        got = client.chat.completions.create(messages=ASKED[0], logprobs=True, **asked)
        assert got.usage.prompt_tokens == want.prompt_tokens
        for ours, theirs in zip(got.choices[0].logprobs.content, want.logprobs, strict=True):
            assert abs(ours.logprob - theirs) < 1e-4
        content = [{"type": "text", "text": "What?"}, media_part("image", (SAMPLES / "shapes.png").read_bytes())]
        messages = [{"role": "user", "content": content}]
        with pytest.raises(openai.BadRequestError, match="the model reads text only") as refused:
            client.chat.completions.create(messages=messages, **asked)
        assert refused.value.param == "messages[0].content[1]"
        status, body = server.post("v1/warmup", messages=messages)
        assert (status, body["error"]["code"]) == (400, "unsupported_content")
        assert not any("media" in name for name in server.processes())
