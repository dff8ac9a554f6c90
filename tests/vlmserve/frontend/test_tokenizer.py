"""Loading tokenizers, the bytes of their ids, and sampling parameters."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.vlmserve.tiny_tokenizer import make_tokenizer, write_tokenizer_folder
from vlmserve.frontend.requests import GenerateReqInput, TextPrompt
from vlmserve.frontend.sampling import choice_seed, load_sampling_defaults, verify_sampling_params
from vlmserve.ipc.messages import SamplingParams
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer, load_text_tokenizer
from vlmserve_common.errors import BadRequestError, CheckpointError

RAW = make_tokenizer()


@given(st.text(max_size=60))
def test_encoding_loses_nothing(text):
    tokenizer = TextTokenizer(RAW)
    ids = tokenizer.encode(text)
    assert ids == RAW.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == RAW.normalizer.normalize_str(text)


@given(st.lists(st.sampled_from(["<|im_end|>", "<think>", "Look: ", "(", "é", "a\n", " ", "assist"]), max_size=6))
def test_text_is_continued_as_if_it_had_been_whole(parts):
    tokenizer = TextTokenizer(RAW)
    before = "".join(parts)
    for more in ("<0.2 seconds>", "ant", "\u0301."):
        ids = tokenizer.encode(before)
        assert tokenizer.continue_text(ids, more) == tokenizer.encode(before + more)
    assert tokenizer.encode("assist") + tokenizer.encode("ant") != tokenizer.encode("assistant")


def test_special_tokens_in_a_prompt_are_ids():
    tokenizer = TextTokenizer(RAW)
    assert tokenizer.encode("<|im_end|>") == [tokenizer.id_of("<|im_end|>")]
    assert tokenizer.token_bytes(tokenizer.id_of("<|im_end|>")) == b"<|im_end|>"
    assert tokenizer.id_of("<think>") not in tokenizer.special_ids


def test_other_threads_run_while_a_text_is_tokenised():
    tokenizer, ended, turns = TextTokenizer(RAW), threading.Event(), 0
    thread = threading.Thread(target=lambda: (tokenizer.encode("the list of files " * 10_000), ended.set()))
    thread.start()
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10  # two, if the interpreter is held


def test_a_tokenizer_of_another_kind_is_refused():
    other = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    other.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="byte-level"):
        TextTokenizer(other)


def test_loading_from_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor"):
        load_text_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot load"):
        load_text_tokenizer(tmp_path)
    raw = make_tokenizer()
    raw.enable_truncation(2)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert load_text_tokenizer(tmp_path).encode("the list of files") == RAW.encode("the list of files").ids


def test_tokens_that_only_the_configuration_knows(tmp_path):
    write_tokenizer_folder(tmp_path)
    size = TextTokenizer(RAW).num_ids
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}

    def configure(index: int) -> None:
        added = {
            str(index + 1): {"content": "<plain>", "special": False, **plain},
            str(index): {"content": "<|new|>", "special": True, **plain},
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))

    configure(size)
    tokenizer = load_text_tokenizer(tmp_path)
    assert tokenizer.encode("<|new|><plain>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<plain>"
    configure(size + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json puts"):
        load_text_tokenizer(tmp_path)


def test_vocabulary_files_alone(tmp_path):
    from tests import hf_env  # noqa: F401

    RAW.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    text = "the list of 日本語 files"
    tokenizer = load_text_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- sampling


def test_sampling_defaults(tmp_path):
    config = tmp_path / "generation_config.json"
    plain = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, seed=7)
    assert load_sampling_defaults(tmp_path).apply(SamplingParams(), seed=7) == plain
    config.write_text(json.dumps({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 3}))
    params = load_sampling_defaults(tmp_path).apply(SamplingParams(top_k=0, seed=3), seed=7)
    assert params == replace(plain, temperature=0.7, top_p=0.8, top_k=0, seed=3)
    assert load_sampling_defaults(tmp_path, "openai").apply(SamplingParams(), seed=7) == plain
    config.write_text(json.dumps({"do_sample": False, "temperature": 0.7}))
    assert load_sampling_defaults(tmp_path).apply(SamplingParams()).temperature == 0


@given(st.integers(-(2**63), 2**63 - 1))
def test_choices_have_seeds_of_their_own(seed):
    first, *others = (choice_seed(seed, index) for index in range(128))
    assert all(0 <= one < 2**63 for one in (first, *others))
    assert seed < 0 or first == seed
    assert len({first, *others}) == 128


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_must_be_finite(value):
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        with pytest.raises(BadRequestError) as caught:
            verify_sampling_params(SamplingParams(**{name: value}), vocab_size=10)
        assert caught.value.param == name


def test_older_names_and_none_for_what_is_left_out():
    params = SamplingParams(max_tokens=5, stop=None, logit_bias=None, presence_penalty=None)
    assert params == SamplingParams(max_new_tokens=5)
    assert replace(params, max_new_tokens=6).max_new_tokens == 6
    asked = GenerateReqInput(request_id="r", prompt=TextPrompt(text=""), sampling=params)
    assert replace(asked, n=2).sampling_params == params
    with pytest.raises(ValueError, match="give one"):
        SamplingParams(max_tokens=5, max_new_tokens=6)
