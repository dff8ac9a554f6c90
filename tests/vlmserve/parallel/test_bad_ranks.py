"""Where ranks and their encoders are; and ranks that do not fit together, or that a machine has no place for."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import rank_processes
from vlmserve.engine.encoder import encoder_devices
from vlmserve.engine.rank_processes import join_ranks, rank_args
from vlmserve_common.errors import EngineError
from vlmserve_common.parallel.meeting import MeetingPlace


def said_by_both(tmp_path: Path, first: EngineArgs, second: EngineArgs) -> str:
    """The line that both ranks end with."""
    there = MeetingPlace(address=str(tmp_path / "ranks"), size=2, ready_by=time.monotonic() + 30, timeout_s=30.0)

    def join(rank: int) -> str:
        args = replace(rank_args((first, second)[rank], rank), num_threads=1)
        with pytest.raises(EngineError) as caught:
            join_ranks(args, rank, there)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(join, range(2)))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    return said[0]


@pytest.fixture
def folders(tmp_path: Path) -> list[EngineArgs]:
    """The same checkpoint on two machines, in two shards."""
    made = [make_checkpoint("qwen3_vl", tmp_path / str(number), shards=2) for number in range(2)]
    return [EngineArgs(model=str(folder), tp_size=2, device="cpu") for folder in made]


@pytest.mark.parametrize("shards_are_missing", [False, True])
def test_another_model_on_another_machine(tmp_path: Path, folders: list[EngineArgs], shards_are_missing: bool):
    if shards_are_missing:
        next(Path(folders[1].model).glob("*.safetensors")).unlink()
    else:
        config = Path(folders[1].model, "config.json")
        content = json.loads(config.read_text())
        content["text_config"]["rms_norm_eps"] = 1e-5
        config.write_text(json.dumps(content))
    assert said_by_both(tmp_path, *folders).startswith("rank 1 differs from rank 0: the model is '")


def test_other_settings_on_another_machine(tmp_path: Path, folders: list[EngineArgs]):
    said = said_by_both(tmp_path, folders[0], replace(folders[1], page_size=32))
    assert said == "rank 1 differs from rank 0: --page-size is '32' there, and '16' here"


def test_another_version_on_another_machine(tmp_path: Path, folders: list[EngineArgs], monkeypatch: pytest.MonkeyPatch):
    about, model = rank_processes._about, folders[1].model
    monkeypatch.setattr(
        rank_processes,
        "_about",
        lambda args: about(args) | ({"vlmserve's version": "0.0"} if args.model == model else {}),
    )
    assert said_by_both(tmp_path, *folders).startswith("rank 1 differs from rank 0: vlmserve's version is '0.0' there")


def test_ranks_share_the_memory_of_a_cpu(folders: list[EngineArgs]):
    both = [rank_args(replace(folders[0], mem_fraction_static=0.8), rank) for rank in range(2)]
    assert [args.mem_fraction_static for args in both] == [0.4, 0.4]


def test_more_ranks_than_gpus(folders: list[EngineArgs], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_processes, "resolve_device", lambda name: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EngineError, match=r"2 ranks .*--tp-size.* want as many GPUs, from cuda:1 on; the last one is"):
        rank_args(replace(folders[0], device="cuda:1"), 0)


@pytest.mark.parametrize(
    ("sizes", "device", "expected"),
    [
        ({}, "cpu", ()),
        ({"tp_size": 2}, "cpu", ("cpu", "cpu")),
        ({"tp_size": 4, "nnodes": 2, "node_rank": 1}, "cpu", ("cpu", "cpu")),
        ({"tp_size": 2, "encoder_dp_size": 3}, "cpu", ("cpu",) * 3),
        ({"tp_size": 2}, "cuda:1", ("cuda:1", "cuda:2")),
    ],
)
def test_each_rank_may_have_an_encoder_beside_it(sizes: dict, device: str, expected: tuple, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    args = EngineArgs(model="m", mm_encoder_tp_mode="data", **sizes)
    assert encoder_devices(args, torch.device(device)) == expected


def test_encoders_are_on_the_gpus_behind_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    two = EngineArgs(model="m", encoder_dp_size=2)
    assert encoder_devices(two, torch.device("cuda:0")) == ("cuda:1", "cuda:2")
    assert encoder_devices(replace(two, tp_size=2, pp_size=2), torch.device("cuda:1")) == ("cuda:5", "cuda:0")
