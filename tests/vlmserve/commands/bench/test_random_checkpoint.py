"""The benchmarks' checkpoint, at a small size: complete, reproducible, and what transformers would load."""

from __future__ import annotations

import torch

from tests import hf_env  # noqa: F401
from vlmserve.commands.bench.random_checkpoint import write_random_checkpoint
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer

TEXT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
VISION = {"depth": 3, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}


def test_it_loads_here_and_in_transformers_and_is_reproducible(tmp_path, monkeypatch):
    from transformers import AutoModelForImageTextToText

    monkeypatch.setattr("vlmserve.commands.bench.random_checkpoint._SHARD_BYTES", 100_000)
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


def test_rows_beyond_the_tokenizer_are_zero(tmp_path):
    folder = write_random_checkpoint(tmp_path, text_sizes=TEXT, vision_sizes=VISION)
    used, rows = load_text_tokenizer(folder).num_ids, load_model(folder).language_model.embed_tokens.weight
    assert not rows[used:].any()
    assert rows[:used].any(dim=1).all()
