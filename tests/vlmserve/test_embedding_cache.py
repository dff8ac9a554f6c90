"""Embeddings that outlive an engine: another one on the same folder starts warm, and answers the same."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine import build
from vlmserve.executor.model_runner import ModelRunner

SAMPLING = SamplingOverrides(temperature=0.0, max_new_tokens=6, ignore_eos=True)


def run(model: Path, folder: Path, **settings):
    """Answers to a few conversations, and the encoder's figures afterwards."""
    settings = {"num_threads": 1, "max_total_tokens": 2048, "embedding_cache_dir": str(folder), **settings}
    with LLM(str(model), **settings) as llm:
        answers = [answer.token_ids for answer in llm.chat_batch(conversations()[:6], SAMPLING)]
        return answers, llm.stats().encoder


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2_vl", "qwen2_5_vl"))]
)
def test_a_second_engine_starts_warm_and_answers_the_same(family: str, tmp_path: Path):
    model = make_checkpoint(family, tmp_path / "model")
    first, cold = run(model, tmp_path / "cache")
    assert cold.encoded > 0
    assert cold.disk.hits == 0
    again, warm = run(model, tmp_path / "cache")
    assert again == first
    assert warm.encoded == 0
    assert warm.disk.hits == cold.encoded


def test_damaged_entries_and_those_of_other_weights_are_encoded_anew(tmp_path: Path):
    model = make_checkpoint("qwen3_vl", tmp_path / "model")
    first, cold = run(model, tmp_path / "cache")
    for number, path in enumerate(sorted((tmp_path / "cache").rglob("*.safetensors"))):
        data = bytearray(path.read_bytes())
        if number % 2:
            path.write_bytes(data[: len(data) // 2])
        else:
            data[-1] ^= 1
            path.write_bytes(data)
    again, after = run(model, tmp_path / "cache")
    assert again == first
    assert after.encoded == cold.encoded
    other = make_checkpoint("qwen3_vl", tmp_path / "other", seed=1)
    _, foreign = run(other, tmp_path / "cache")
    assert foreign.encoded == cold.encoded


def test_encoder_processes_share_a_folder_with_engines_that_encode_themselves_and_the_tower_is_theirs_alone(
    tmp_path: Path, monkeypatch
):
    model = make_checkpoint("qwen3_vl", tmp_path / "model")
    first, cold = run(model, tmp_path / "cache")
    made = []
    monkeypatch.setattr(build, "ModelRunner", lambda **parts: made.append(parts["model"]) or ModelRunner(**parts))
    again, warm = run(model, tmp_path / "cache", encoder_dp_size=1)
    assert again == first
    assert (warm.encoded, warm.disk.hits) == (0, cold.encoded)
    assert [parameter for parameter in made[0].visual.parameters() if not parameter.is_meta] == []


@pytest.mark.parametrize("encoders", [0, 1])
def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path, encoders: int):
    model = make_checkpoint("qwen3_vl", tmp_path / "model")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Exception, match="setting embedding_cache_dir"):
        run(model, tmp_path / "file", encoder_dp_size=encoders)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 16, "encoder_cache_mib": 0, "page_size": 4}])
def test_encoder_processes_give_the_same_answers_and_are_replaced_when_they_die(tmp_path: Path, settings):
    model = make_checkpoint("qwen3_vl", tmp_path / "model")
    settings = {"num_threads": 1, "max_total_tokens": 2048, "disable_radix_cache": True, **settings}
    with LLM(str(model), **settings) as llm:
        inline = [answer.token_ids for answer in llm.chat_batch(conversations()[:4], SAMPLING)]
        encoded = llm.stats().encoder.encoded
    with LLM(str(model), **settings, encoder_dp_size=2) as llm:
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        assert [answer.token_ids for answer in llm.chat_batch(conversations()[:4], SAMPLING)] == inline
        assert llm.stats().encoder.encoded >= encoded
        for worker in workers:
            worker.kill()
        assert [answer.token_ids for answer in llm.chat_batch(conversations()[6:8], SAMPLING)]
        assert [answer.token_ids for answer in llm.chat_batch(conversations()[:4], SAMPLING)] == inline
    assert multiprocessing.active_children() == []
