"""Towers against transformers', float32, over grids that stress positions, windows and packing."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from vision.towers.loading import make_tower
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.errors import CheckpointError

# single block; square; not a multiple of a window (4 merged); wide; long video; whole windows; tall
GRIDS = [(1, 2, 2), (1, 8, 8), (1, 6, 10), (1, 4, 26), (3, 4, 6), (2, 16, 8), (1, 18, 2)]


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same weights here and in transformers."""

    family: str
    folder: Path
    tower: torch.nn.Module
    reference: torch.nn.Module

    def pixels(self, grids: list[tuple[int, int, int]], seed: int = 0) -> torch.Tensor:
        """Random patches for some grids."""
        count = sum(t * h * w for t, h, w in grids)
        width = self.tower.patch_embed.proj.weight.shape[1]
        return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))

    def expected(self, pixels: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        """transformers' rows, DeepStack rows beside them."""
        return reference_rows(self.reference.model.visual, pixels, grids)


@torch.inference_mode()
def reference_rows(visual: torch.nn.Module, pixels: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """What a tower of transformers makes."""
    out = visual(pixels, grid_thw=torch.tensor(grids), return_dict=True)
    return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or [])], dim=1)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    from transformers import AutoModelForImageTextToText

    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return Pair(request.param, folder, load_model(folder).visual, reference)


@torch.inference_mode()
def test_a_packed_batch_of_mixed_sizes_equals_single_calls_and_transformers(pair):
    pixels = pair.pixels(GRIDS)
    rows = pair.tower(pixels, GRIDS)
    parts = pixels.split([t * h * w for t, h, w in GRIDS])
    singles = torch.cat([pair.tower(part, [grid]) for part, grid in zip(parts, GRIDS, strict=True)])
    assert rows.shape[1] == pair.tower.out_hidden_size * (1 + pair.tower.num_deepstack_layers)
    torch.testing.assert_close(rows, singles, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows, pair.expected(pixels, GRIDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("grids", "patches", "message"),
    [
        ([(1, 4, 4)], 15, "the grids have 16 patches, and there are 15 rows"),
        ([(1, 3, 4)], 12, "multiples of 2"),
        ([(0, 4, 4)], 0, "t must be 1 or more"),
    ],
)
def test_grids_that_do_not_fit_are_refused(pair, grids, patches, message):
    pixels = torch.zeros(patches, pair.tower.patch_embed.proj.weight.shape[1])
    with pytest.raises(ValueError, match=message):
        pair.tower(pixels, grids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth is 0"),
        ({"num_heads": 3}, "multiple of 4"),
        ({"hidden_act": "relu6"}, "'relu6'"),
        ({"num_position_embeddings": 65}, "must be a square"),
        ({"deepstack_visual_indexes": [2, 1]}, "ascending"),
        ({"deepstack_visual_indexes": [1, 9]}, "ascending layers below 4"),
        ({"patch_size": "16"}, "patch_size is '16'"),
        ({"out_hidden_size": None}, "out_hidden_size is missing"),
    ],
)
def test_impossible_vision_configs_are_refused(tmp_path, change, message):
    config = read_json(make_checkpoint("qwen3_vl", tmp_path), "config.json")
    config["vision_config"] |= change
    with pytest.raises(CheckpointError, match=message):
        make_tower(config, torch.float32, "cpu")


def test_unknown_families_are_refused():
    with pytest.raises(CheckpointError, match="'qwen9_vl'; there are qwen2_vl, qwen2_5_vl, qwen3_vl"):
        make_tower({"model_type": "qwen9_vl", "vision_config": {}}, torch.float32, "cpu")


@torch.inference_mode()
def test_bfloat16_stays_as_near_to_float32_as_transformers_does(pair):
    grids = [(1, 8, 8), (1, 6, 10)]
    pixels = pair.pixels(grids)
    truth = pair.expected(pixels, grids)
    config = read_json(pair.folder, "config.json")
    tower = make_tower(config, torch.bfloat16, "cpu")
    tower.load_state_dict(pair.tower.state_dict())
    rows = tower(pixels, grids)
    assert rows.dtype == torch.bfloat16
    reference = copy.deepcopy(pair.reference.model.visual).to(torch.bfloat16)
    theirs = (reference_rows(reference, pixels, grids).float() - truth).square().mean().sqrt()
    ours = (rows.float() - truth).square().mean().sqrt()
    assert 0 < ours < 1.2 * theirs
