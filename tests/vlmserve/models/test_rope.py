"""Frequencies of scaled rotary positions against transformers, to the bit, and the context lengths that they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import hf_env  # noqa: F401  (before transformers)

# isort: split
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.rope import context_length, read_rope
from vlmserve_common.compute.rotary import rotation, scaled_frequencies

HEAD = 64
LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: list[tuple[dict[str, Any], int]] = [
    # and the context length of a model with max_position_embeddings 4096
    ({"type": "linear", "factor": 3.7}, 15155),
    ({"rope_type": "dynamic", "type": "yarn", "factor": 4}, 4096),
    ({"type": "yarn", "factor": 4.0}, 16384),
    ({"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 1024}, 4096),
    ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, 4096),
    ({"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 2048, "truncate": False}, 16384),
    ({"type": "yarn", "factor": 8, "beta_fast": 7, "beta_slow": 3.5}, 32768),
    ({"type": "yarn", "factor": 8, "beta_fast": 0, "attention_factor": 1.75}, 32768),
    ({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7}, 163840),
    ({"type": "yarn", "factor": 40, "mscale": 0.7}, 163840),
    ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 6}, 4096),  # no element turns once
    (LLAMA3 | {"factor": 8.0}, 4096),
    (LLAMA3 | {"factor": 32, "high_freq_factor": 9}, 16384),
]


@pytest.mark.parametrize(("scaling", "context"), SCALINGS)
@pytest.mark.parametrize("theta", [500.0, 1_000_000])
def test_frequencies_are_those_of_transformers(scaling, context, theta):
    sizes: dict[str, Any] = {"max_position_embeddings": 4096, "rope_theta": theta, "head_dim": HEAD}
    text = Fields(sizes | {"rope_scaling": scaling}, "config.json")
    rope = read_rope(text, 3.0)
    kind = str(scaling.get("rope_type", scaling.get("type")))
    wanted, magnitude = ROPE_INIT_FUNCTIONS[kind](Qwen3Config(**sizes, rope_scaling=dict(scaling)), None)
    assert torch.equal(scaled_frequencies(HEAD, rope), wanted)
    assert rope.magnitude == magnitude
    assert context_length(text) == context


def test_rope_scaling_stands_before_rope_parameters():
    parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0}
    config: dict[str, Any] = {"max_position_embeddings": 64, "rope_parameters": parameters}
    assert read_rope(Fields(config, ""), 3.0).theta == Qwen3Config(**config).rope_parameters["rope_theta"] == 7
    for scaling in ({"type": "linear", "factor": 2.0}, {}):
        both = config | {"rope_scaling": scaling, "rope_theta": 9.0}
        theirs = Qwen3Config(**both).rope_parameters
        assert read_rope(Fields(both, ""), 3.0).theta == theirs["rope_theta"] == (9 if scaling else 7)


def test_a_magnitude_makes_longer_before_rounding():
    angles = torch.rand(5, 8) * 9
    cos, sin = rotation(angles, torch.bfloat16, 1.3)
    assert torch.equal(cos[:, 0, :8], (angles.cos() * 1.3).bfloat16())
    assert torch.equal(sin[:, 0, 8:], (angles.sin() * 1.3).bfloat16())
