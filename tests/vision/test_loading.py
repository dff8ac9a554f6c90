"""A tower loaded alone is the whole model's, refused where that is, and known by its fingerprint."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vlmserve.models.edits import edit_config, edit_weights
from vision.towers import loading
from vision.towers.loading import load_tower, tower_fingerprint
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.errors import CheckpointError


def fingerprint_of(tower, folder, **changes) -> bytes:
    return tower_fingerprint(tower, read_json(folder, "config.json")["vision_config"] | changes)


@pytest.mark.parametrize("nested_names", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_alone_is_that_of_the_whole_model(tmp_path, family, nested_names):
    folder = make_checkpoint(family, tmp_path, dtype="bfloat16", nested_names=nested_names, shards=2)
    for dtype in (None, torch.float32):
        whole, alone = load_model(folder, dtype=dtype).visual, load_tower(folder, dtype=dtype)
        assert type(alone) is type(whole)
        assert whole.state_dict().keys() == alone.state_dict().keys()
        for name, value in whole.state_dict().items():
            assert alone.state_dict()[name].dtype == (dtype or torch.bfloat16)
            assert torch.equal(alone.state_dict()[name], value), name
        assert not alone.training
        assert not any(parameter.requires_grad for parameter in alone.parameters())
        assert fingerprint_of(alone, folder) == fingerprint_of(whole, folder)


def test_only_the_towers_tensors_are_read(tmp_path, monkeypatch):
    read = []
    take = CheckpointReader.read_into
    monkeypatch.setattr(
        CheckpointReader,
        "read_into",
        lambda self, targets: take(self, [read.append(pair[0].name) or pair for pair in targets]),
    )
    load_tower(make_checkpoint("qwen3_vl", tmp_path))
    assert read
    assert all(name.startswith("model.visual.") for name in read)


def test_every_tensor_of_the_tower_is_accounted_for(tmp_path):
    folder = make_checkpoint("qwen2_5_vl", tmp_path)
    edit_weights(
        folder,
        lambda tensors: (
            tensors.pop("visual.blocks.2.mlp.up_proj.bias"),
            tensors.update({"visual.patch_embed.proj.weight": torch.zeros(32, 3 * 2 * 14 * 14)}),
            tensors.update({"visual.surprise": torch.zeros(1), "merger.ln_q.weight": torch.zeros(1)}),
            tensors.update({"visual.rotary_pos_emb.inv_freq": torch.zeros(8)}),
            tensors.pop("model.norm.weight"),
        ),
    )
    with pytest.raises(CheckpointError) as error:
        load_tower(folder)
    text = str(error.value)
    assert "1 missing: visual.blocks.2.mlp.up_proj.bias (though gate_proj is there)" in text
    assert "1 unexpected: visual.surprise." in text
    assert "visual.patch_embed.proj.weight is [32, 1176], not [32, 3, 2, 14, 14]" in text
    assert "norm" not in text, "what is not the tower's is another's business"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llava", "architectures": []}, r"'llava' \(architectures .*supported are qwen2_vl"),
        ({"torch_dtype": "int8", "dtype": "int8"}, "dtype is 'int8'; supported are float32"),
        ({"vision_config": None}, "no vision_config"),
    ],
)
def test_impossible_checkpoints_are_refused(tmp_path, change, message):
    folder = make_checkpoint("qwen2_vl", tmp_path)
    edit_config(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_tower(folder)


def test_a_fingerprint_tells_towers_apart(tmp_path, monkeypatch):
    folder = make_checkpoint("qwen3_vl", tmp_path / "a")
    other = shutil.copytree(folder, tmp_path / "b")
    edit_weights(other, lambda tensors: tensors["model.visual.blocks.1.attn.proj.bias"][3:4].mul_(1.0001))
    tower = load_tower(folder)
    found = {
        "same": fingerprint_of(tower, folder),
        "weight": fingerprint_of(load_tower(other), other),
        "dtype": fingerprint_of(load_tower(folder, dtype=torch.bfloat16), folder),
        "taps": fingerprint_of(tower, folder, deepstack_visual_indexes=[0, 2]),
        "activation": fingerprint_of(tower, folder, hidden_act="gelu"),
        "mode": tower_fingerprint(tower, read_json(folder, "config.json")["vision_config"], "w8a8"),
    }
    monkeypatch.setattr(loading, "_VERSION", b"vlmserve tower 0")
    found["version"] = fingerprint_of(tower, folder)
    assert len(set(found.values())) == len(found), found
    assert {len(value) for value in found.values()} == {32}
