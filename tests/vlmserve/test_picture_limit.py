"""`--max-pixels auto`: which size a CPU's speed comes to."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from processors.families.config import read_processor_config
from tests.tiny_checkpoints import make_checkpoint
from vision.towers.loading import outline_tower
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import encoder
from vlmserve.engine.encoder import allowed_sizes, auto_max_pixels, encode_seconds, product_rate
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.cpus import available_cpus

CPU = torch.device("cpu")
LARGEST = 16_777_216


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that shows pictures in full size."""
    folder = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("model"))
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] = LARGEST
    file.write_text(json.dumps(settings))
    return folder


def chosen(folder: Path, rate: float, *, num_threads: int | None = 1, **settings: object) -> int | None:
    """rate: of a thread, in FLOP/s."""
    args = EngineArgs(model=str(folder), num_threads=num_threads, **settings)  # type: ignore[arg-type]
    return auto_max_pixels(args, dtype=torch.float32, device=CPU, rate=lambda *_: rate)


def test_the_largest_size_that_is_encoded_in_time(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = read_processor_config(folder, read_hf_config(folder))
    tower, sizes = outline_tower(folder), allowed_sizes(config)
    assert sizes[0] == 448 * 448
    assert sizes[-1] == LARGEST
    assert all(1.38 < after / before < 1.42 for before, after in pairwise(sizes[:-1]))
    assert all(area % config.patches.factor**2 == 0 for area in sizes)
    for area, above in pairwise(sizes):
        just = encode_seconds(tower, config, area, 1.0) / 20 * 1.01  # FLOP/s with which it takes a little under 20 s
        assert chosen(folder, just) == area
        assert encode_seconds(tower, config, above, just) > 20
        if area > sizes[0]:
            assert chosen(folder, just / 1.03) < area
    with caplog.at_level("INFO"):
        area = chosen(folder, encode_seconds(tower, config, sizes[4], 1.0) / 7.99, max_pixels_auto_s=8)
    assert area == sizes[4] == 802816
    assert "at most 802816 pixels (1024x768 of 4:3), which this CPU encodes in about 8 s" in caplog.text


def test_the_bounds(folder: Path) -> None:
    assert chosen(folder, 1.0) == 448 * 448, "however slow the machine"
    assert chosen(folder, math.inf) is None, "the checkpoint's own"


@pytest.mark.parametrize("given", ["checkpoint", 123_456])
def test_what_is_said_is_not_measured(folder: Path, given: int | str) -> None:
    args = EngineArgs(model=str(folder), max_pixels=given)
    assert auto_max_pixels(args, dtype=torch.float32, device=CPU, rate=never) is None


def test_a_gpu_shows_the_full_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    args = EngineArgs(model=str(folder))
    assert auto_max_pixels(args, dtype=torch.float32, device=cuda, rate=never) is None
    monkeypatch.setattr(encoder, "encoder_devices", lambda *_: ("cuda:1", "cpu"))
    mixed = EngineArgs(model=str(folder), encoder_dp_size=2)
    assert auto_max_pixels(mixed, dtype=torch.float32, device=cuda, rate=lambda *_: 1.0) == 448 * 448


def test_a_small_checkpoint_is_not_measured(folder: Path, tmp_path: Path) -> None:
    small = make_checkpoint("qwen2_vl", tmp_path)
    largest = read_processor_config(small, read_hf_config(small)).max_pixels
    assert largest <= 448 * 448
    args = EngineArgs(model=str(small))
    assert auto_max_pixels(args, dtype=torch.float32, device=CPU, rate=never) is None


def test_encoder_processes_have_their_part_of_the_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    config = read_processor_config(folder, read_hf_config(folder))
    rate = encode_seconds(outline_tower(folder), config, 802816, 1.0) / 19
    assert chosen(folder, rate) == 802816
    assert chosen(folder, rate, encoder_dp_size=2, encoder_threads=1) == 802816
    assert chosen(folder, rate / 2, encoder_dp_size=2, encoder_threads=1) < 802816
    assert chosen(folder, rate / available_cpus(), num_threads=None) == 802816


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_is_measured(dtype: torch.dtype) -> None:
    assert 1e6 < product_rate(dtype, 64, 96) < math.inf


def never(*_: object) -> float:
    raise AssertionError("nothing is to be measured")
