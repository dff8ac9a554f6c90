"""The GPU benchmark, on a CPU: it runs, compares like with like, and says what it needs."""

from __future__ import annotations

import json

import pytest
import torch

from tests import hf_env  # noqa: F401
from vlmserve import cli
from vlmserve.bench.gpu_measures import PARTS, Bench
from vlmserve.bench.gpu_sizes import FULL, SMALL, make_prompts
from vlmserve.bench.random_checkpoint import write_random_checkpoint
from vlmserve.tokenizer.text_tokenizer import load_text_tokenizer
from vlmserve_common.errors import EngineError


def test_it_runs_and_tells_what_it_measured(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--small", "--rounds", "1", "--dtype", "float32", "--json", str(out)]
    assert cli.main(["bench", "gpu", *words]) == 0
    found = json.loads(out.read_text())
    assert {"commit", "torch", "transformers", "device"} <= set(found["about"])
    figures = found["figures"]
    counts = {"memory": 0, "tower": 1, "prefill": 1, "decode": 2, "picture": 1, "cache": 2}
    assert {part: len(made) for part, made in figures.items()} == counts
    assert list(counts) == list(PARTS)
    compared = [one for part in ("tower", "prefill", "decode", "picture") for one in figures[part]]
    for one in compared:
        good = one["theirs"]["median"] / one["ours"]["median"]
        assert one["ratio"]["median"] == pytest.approx(good if one["unit"] == "ms" else 1 / good)
    printed = capsys.readouterr().out
    # float32: the two engines do the same work
    assert all(f"{batch} of {batch} answers are equal" in printed for batch in SMALL.batches)
    assert "torch: " in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(["bench", "gpu"]) == 1
    assert "finds no CUDA device here; --device cpu --small tries the benchmark out" in capsys.readouterr().err


def test_prompts_have_the_tokens_they_are_to_have(tmp_path):
    folder = write_random_checkpoint(tmp_path, text_sizes=SMALL.text, vision_sizes=SMALL.vision)
    tokenizer = load_text_tokenizer(folder)
    for sizes in (SMALL, FULL):
        prompts = make_prompts(tokenizer, max(sizes.batches), sizes.short_prompt)
        assert len(set(prompts)) == max(sizes.batches)
        assert {len(tokenizer.encode(text)) for text in prompts} == {sizes.short_prompt}
    assert make_prompts(tokenizer, 1, 16) == make_prompts(tokenizer, 1, 16)
    tokenizer.encode = lambda text: [1, 2]
    with pytest.raises(EngineError, match="too few of the words"):
        make_prompts(tokenizer, 1, 16)


def test_rows_that_were_to_be_found_are_found(tmp_path, monkeypatch):
    folder = write_random_checkpoint(tmp_path, text_sizes=SMALL.text, vision_sizes=SMALL.vision)
    bench = object.__new__(Bench)  # its cache alone needs neither engine
    bench._sizes, bench._device, bench._dtype = SMALL, torch.device("cpu"), torch.bfloat16
    bench._rounds, bench._folder = 1, folder
    assert [one.name for one in bench.cache()] == [
        "rows of a picture, encoded",
        "rows of a picture, found in the device",
    ]
    monkeypatch.setattr("vlmserve.bench.gpu_measures.PLENTY", 0)
    with pytest.raises(AssertionError, match="were encoded again"):
        bench.cache()


def test_all_sizes_fit_the_kv_cache():
    for sizes in (SMALL, FULL):
        assert sizes.kv_tokens >= max(sizes.batches) * (sizes.short_prompt + sizes.answer)
        assert sizes.kv_tokens >= sizes.long_prompt + 64
        assert sizes.kv_tokens >= sizes.side**2 // 256 + 512
        assert sizes.kv_tokens % 16 == 0
