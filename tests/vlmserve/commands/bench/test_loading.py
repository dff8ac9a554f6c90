"""How much memory ranks take until they can compute: about their weights, whatever these are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.tiny_checkpoints import make_checkpoint
from vlmserve.commands.bench.gpu.shapes import SHAPES, ModelShape
from vlmserve.commands.bench.loading import measure_loading, with_layers, write_filled
from vlmserve_common.errors import EngineError

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
