"""What a picture costs a tower, counted by hand from the published sizes."""

from __future__ import annotations

import pytest
import torch

from vision.towers.blocks import encoding_flops
from vision.towers.loading import make_tower

QWEN3_VL_2B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
QWEN2_5_VL = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


@pytest.mark.parametrize("patches", [784, 7500])
def test_qwen3_vl(patches: int) -> None:
    tower = make_tower({"model_type": "qwen3_vl", "vision_config": QWEN3_VL_2B}, torch.bfloat16, "meta")
    layer = 4 * 1024**2 + 2 * 1024 * 4096
    mergers = 4 * (4096 * 4096 + 4096 * 2048) / 4
    want = 2 * patches * (3 * 2 * 16 * 16 * 1024 + 24 * layer + mergers) + 24 * 4 * 1024 * patches**2
    assert encoding_flops(tower, patches) == pytest.approx(want)


def test_windows_are_not_the_whole_picture() -> None:
    tower = make_tower({"model_type": "qwen2_5_vl", "vision_config": QWEN2_5_VL}, torch.bfloat16, "meta")
    layer = 4 * 1280**2 + 3 * 1280 * 3420
    merger = (5120 * 5120 + 5120 * 2048) / 4
    want = 2 * 4096 * (3 * 2 * 14 * 14 * 1280 + 32 * layer + merger) + 4 * 4 * 1280 * 4096**2
    assert encoding_flops(tower, 4096) == pytest.approx(want)
