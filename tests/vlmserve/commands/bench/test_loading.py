"""The benchmarks' checkpoints: complete, reproducible, and how much memory ranks take to load them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from vlmserve.commands.bench.checkpoints import SHAPES, ModelShape, write_random_checkpoint
from vlmserve.commands.bench.loading import measure_loading, with_layers, write_filled
from vlmserve.commands.plan.published import PUBLISHED
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint.reader import read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.errors import EngineError

TEXT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
VISION = {"depth": 3, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}


def test_it_loads_here_and_in_transformers_and_is_reproducible(tmp_path, monkeypatch):
    from transformers import AutoModelForImageTextToText

    monkeypatch.setattr("vlmserve.commands.bench.checkpoints._SHARD_BYTES", 100_000)
    folder = write_random_checkpoint(tmp_path / "a", text_sizes=TEXT, vision_sizes=VISION, seed=3)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = load_model(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.num_layers == 2
    assert model.visual.num_deepstack_layers == 2
    again = load_model(write_random_checkpoint(tmp_path / "b", text_sizes=TEXT, vision_sizes=VISION, seed=3))
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def test_it_has_names_of_published_checkpoints_of_qwen4_exp(tmp_path):
    text = dict(next(shape.text for shape in PUBLISHED if shape.family == "qwen4_exp")) | TEXT
    text |= {"num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text |= {"num_hidden_layers": 4, "ple_embed_dim": 64, "ngram_vocab_size_base": 100, "vocab_size": 4096}
    vision = VISION | {"deepstack_visual_indexes": []}
    folder = write_random_checkpoint(tmp_path, text_sizes=text, vision_sizes=vision, family="qwen4_exp")
    names = read_json(folder, "model.safetensors.index.json")["weight_map"]
    assert "model.language_model.hyper_connection_mixer.hc_norm.weight" in names
    assert "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight" in names
    assert load_model(folder).config.num_index_layers == 1


def test_rows_beyond_the_tokenizer_are_zero(tmp_path):
    folder = write_random_checkpoint(tmp_path, text_sizes=TEXT, vision_sizes=VISION)
    used, rows = load_text_tokenizer(folder).num_ids, load_model(folder).language_model.embed_tokens.weight
    assert not rows[used:].any()
    assert rows[:used].any(dim=1).all()


_MIB = 2**20


def narrowed(name: str, **text: Any) -> ModelShape:
    """A published shape of about a GiB: with fewer layers and tokens, and less of a tower."""
    shape = SHAPES[name]
    vision = dict(shape.vision) | {"depth": 6, "deepstack_visual_indexes": [1, 2, 3]}
    return replace(shape, text=dict(shape.text) | {"vocab_size": 32000} | text, vision=vision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tp"),
    [
        (narrowed("2b", num_hidden_layers=8), 2),
        (narrowed("30b-a3b", num_hidden_layers=4, num_experts=32), 1),
    ],
    ids=["dense", "experts"],
)
def test_a_rank_takes_little_more_than_its_weights(tmp_path, shape, tp):
    found = measure_loading(write_filled(tmp_path, shape), tp=tp)
    assert [one.rank for one in found] == list(range(tp))
    for one in found:
        assert one.share > 400 * _MIB
        assert one.start < one.loaded <= one.packed
        # the bound of full-size models, scaled: their weights x 1.15 and 1 GiB, less what a process has to begin with
        assert one.packed - one.start <= one.share * 1.15 + 128 * _MIB


@pytest.mark.slow
def test_what_does_not_load_is_told(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"rank 0 of 1 does not load: .*has neither model\.safetensors nor"):
        measure_loading(folder, tp=1)


def test_a_shape_loses_layers_until_it_is_small_enough():
    assert with_layers(SHAPES["2b"], 10**12) == SHAPES["2b"]
    assert with_layers(SHAPES["2b"], 0).text["num_hidden_layers"] == 3, "DeepStack needs as many"
    # tower and embedding take 1.42e9 bytes, each layer 100.7e6
    assert with_layers(SHAPES["2b"], int(2.4e9)).text["num_hidden_layers"] == 10
