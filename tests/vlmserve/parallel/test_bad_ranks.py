"""Ranks that do not fit together, or that a model or a machine has no place for: one line each, before any loads."""

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
from vlmserve.engine.rank_processes import join_ranks, rank_args
from vlmserve_common.compute.shard import Shard
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


def test_another_model_on_another_machine(tmp_path: Path, folders: list[EngineArgs]):
    config = Path(folders[1].model, "config.json")
    content = json.loads(config.read_text())
    content["text_config"]["rms_norm_eps"] = 1e-5
    config.write_text(json.dumps(content))
    assert said_by_both(tmp_path, *folders).startswith("rank 1 differs from rank 0: the model is '")


def test_shards_that_are_missing_on_another_machine(tmp_path: Path, folders: list[EngineArgs]):
    next(Path(folders[1].model).glob("*.safetensors")).unlink()
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


def test_what_a_model_has_too_few_of(folders: list[EngineArgs]):
    with pytest.raises(EngineError, match="--tp-size is 3: num_attention_heads is 4, which it does not divide"):
        rank_args(replace(folders[0], tp_size=3), 0)
    with pytest.raises(EngineError, match="--tp-size is 5: vocab_size is 4, too few for so many"):
        Shard(0, 5).cut_vocab(4)
    with pytest.raises(EngineError, match="--tp-size is 4: num_key_value_heads is 6, which it does not divide"):
        Shard(0, 4).kv_heads(6)
