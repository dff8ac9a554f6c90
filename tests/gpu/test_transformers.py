"""Bfloat16 end to end: how far logprobs are from transformers' in float32, beside how far its own bfloat16 is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.test_answers import engine
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vlmserve.reference import Reference, conversations
from vlmserve import SamplingOverrides
from vlmserve.commands.bench.checkpoints import TEXT_SIZES, VISION_SIZES, write_random_checkpoint

NEW = 16
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
AS_FAR = 1.5
"""Times as far as transformers' own bfloat16, at the most; and this beside it, where that happens to be near."""
BESIDE = 0.01
MID = {
    "text_sizes": TEXT_SIZES | {"num_hidden_layers": 8, "vocab_size": 8192},
    "vision_sizes": VISION_SIZES | {"depth": 8, "deepstack_visual_indexes": [1, 3, 5]},
}
SMALL_MID = {
    "text_sizes": TEXT_SIZES
    | {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    | {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]}},
    "vision_sizes": VISION_SIZES
    | {"depth": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "out_hidden_size": 256}
    | {"deepstack_visual_indexes": [0, 1, 2]},
}


@pytest.fixture(scope="module", params=[*FAMILIES, "mid"])
def checkpoint(request: pytest.FixtureRequest, device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each family, tiny; and one large enough for kernels to take their usual ways."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mid":
        return write_random_checkpoint(folder, **(MID if device.type == "cuda" else SMALL_MID))
    return make_checkpoint(request.param, folder, dtype="bfloat16")


def logprobs(reference: Reference, messages: list[dict], answer: Sequence[int]) -> np.ndarray:
    """float32 [n]: of an answer's tokens, each behind those before it."""
    made = reference.forward(messages, answer)
    rows = np.arange(made.prompt - 1, made.prompt - 1 + len(answer))
    return made.logprobs[rows, list(answer)]


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(checkpoint, device):
    asked = conversations()[1:5]
    with engine(checkpoint, device, dtype="bfloat16") as llm:
        answers = llm.chat_batch(asked, GREEDY, num_logprobs=1)
    ours = [np.array([one.logprob for one in answer.logprobs]) for answer in answers]
    truth, theirs = Reference(checkpoint), Reference(checkpoint)
    theirs.model.to(torch.bfloat16)
    true, rounded = (
        [logprobs(which, messages, answer.token_ids) for messages, answer in zip(asked, answers, strict=True)]
        for which in (truth, theirs)
    )
    off = np.concatenate([np.abs(a - b) for a, b in zip(ours, true, strict=True)])
    their_off = np.concatenate([np.abs(a - b) for a, b in zip(rounded, true, strict=True)])
    assert np.isfinite(off).all()
    assert off.mean() < AS_FAR * their_off.mean() + BESIDE, (off.mean(), their_off.mean())
    assert np.quantile(off, 0.95) < AS_FAR * np.quantile(their_off, 0.95) + 5 * BESIDE
