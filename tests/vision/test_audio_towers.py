"""Towers for sounds against transformers, alone and in batches with other media."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import hf_env  # noqa: F401

# isort: split
from transformers import AutoConfig

from processors.families.base import MultimodalProcessor, data_item, data_items
from processors.families.registry import make_processor
from tests.omni_checkpoints import FAMILIES, THINKERS, make_omni_checkpoint, tone, wav
from tests.vlmserve.reference import picture
from vision.encoder_pool import EmbedShape
from vision.towers.loading import load_tower
from vision.towers.pieces import UNLIMITED, Kind, PieceLimits, Steps
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.kernels import library

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_omni_checkpoint(request.param, tmp_path_factory.mktemp(request.param), longest_s=20)


@pytest.fixture(scope="module")
def processor(folder: Path) -> MultimodalProcessor:
    return make_processor(folder, read_hf_config(folder))


@pytest.fixture(params=["auto", "off"], ids=["operators", "torch"])
def runner(request: pytest.FixtureRequest, folder: Path) -> TowerRunner:
    library.activate(request.param, threads=1)
    tower = load_tower(folder, dtype=torch.float32)
    pack_linears(tower)
    return TowerRunner(tower, CPU)


def parts(processor: MultimodalProcessor, seconds: float, seed: int = 0) -> list[TemporalPatch]:
    items = data_items(processor.process_audio(wav(tone(seconds, seed=seed))), 2)
    return [patch for item in items for patch in temporal_patches(item)]


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.03, 4.0, 9.97])
@torch.inference_mode()
def test_embeddings_are_those_of_transformers(
    processor: MultimodalProcessor, folder: Path, runner: TowerRunner, seconds: float
) -> None:
    sound = processor.process_audio(wav(tone(seconds)))
    thinker = THINKERS[AutoConfig.from_pretrained(folder).model_type].from_pretrained(folder).eval()
    frames = round(seconds * 100) if "3" in processor.__class__.__name__ else -(-round(seconds * 16000) // 160)
    features = torch.from_numpy(sound.feature[:frames].copy()).T[None]
    found = thinker.get_audio_features(features, feature_attention_mask=torch.ones(1, frames, dtype=torch.long))
    wanted = getattr(found, "pooler_output", found)
    rows = torch.cat(runner.encode(parts(processor, seconds)))
    torch.testing.assert_close(rows[:, : wanted.shape[-1]], wanted.reshape(-1, wanted.shape[-1]), atol=2e-4, rtol=1e-3)
    assert not rows[:, wanted.shape[-1] :].any(), "nothing in DeepStack's columns"


@torch.inference_mode()
def test_embeddings_do_not_depend_on_the_batch_or_on_cuts(processor: MultimodalProcessor, runner: TowerRunner) -> None:
    shown = temporal_patches(data_item(processor.process_image(picture(1, 96, 64))))
    batch = [*parts(processor, 5.1), *shown, *parts(processor, 0.4, seed=1)]
    alone = [rows for patch in batch for rows in runner.encode([patch])]
    steps = runner.steps(batch, slow)
    together, costs = run(steps)
    shape = EmbedShape(merge=2, width=alone[0].shape[1], dtype=torch.float32)
    for patch, one, other in zip(batch, alone, together, strict=True):
        assert one.shape == shape.of(patch)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert len(costs) >= len(run(runner.steps(batch, UNLIMITED))[1])


def slow(kind: Kind) -> float:
    return 1e5


def run(
    steps: Steps[tuple[torch.Tensor, ...]], _limits: PieceLimits = UNLIMITED
) -> tuple[list[torch.Tensor], list[float]]:
    costs = []
    while True:
        try:
            costs.append(next(steps).cost)
        except StopIteration as end:
            return list(end.value), costs
