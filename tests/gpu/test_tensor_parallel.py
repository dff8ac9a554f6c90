"""Two GPUs that share a model's layers: the answers of one, with captured decode steps and without. NCCL takes no two
ranks on one GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.gpu.test_answers import GREEDY
from tests.tiny_checkpoints import HYBRID, MOE, make_checkpoint
from tests.vlmserve.reference import conversations
from vlmserve import LLM

SETTINGS = {"dtype": "float32", "attention_backend": "triton", "max_running_requests": 4, "max_total_tokens": 4096}
EXPERTS = {"ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4, "eplb_rebalance_num_iterations": 5}


@pytest.fixture
def two_gpus(cuda: torch.device) -> str:
    """The first of them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return "cuda:0"


def tokens(folder: Path, device: str, **settings: object) -> tuple[list[list[int]], int, int]:
    """Answers, steps, and sums of ranks as they were computed."""
    with LLM(str(folder), device=device, **SETTINGS, **settings) as llm:
        group = None if llm.engine.rank_processes is None else llm.engine.rank_processes.group
        before = 0 if group is None else group.counts["all_reduce"]
        found = [list(done.token_ids) for done in llm.chat_batch(conversations(), GREEDY)]
        stats = llm.stats()
        sums = 0 if group is None else group.counts["all_reduce"] - before - stats.experts.rebalances_total
        return found, stats.forward_steps_total, sums


@pytest.mark.parametrize(("family", "settings"), [("qwen3_vl", {}), (HYBRID, {}), (MOE, {}), (MOE, EXPERTS)])
def test_the_same_answers_as_alone(
    family: str, settings: dict, two_gpus: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    wanted, *_ = tokens(folder, two_gpus)
    eager, steps, sums = tokens(folder, two_gpus, tp_size=2, disable_cuda_graph=True, **settings)
    assert eager == wanted
    caplog.clear()
    with caplog.at_level(logging.INFO):
        captured, captured_steps, captured_sums = tokens(folder, two_gpus, tp_size=2, **settings)
    assert captured == wanted
    assert "captured decode steps of 1, 2, 4 requests" in caplog.text
    assert sums / steps == captured_sums / captured_steps


@pytest.mark.parametrize("family", ["qwen3_vl", HYBRID])
def test_groups_replay_together(family: str, two_gpus: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    wanted, *_ = tokens(folder, two_gpus)
    with caplog.at_level(logging.INFO):
        assert tokens(folder, two_gpus, tp_size=2, dp_size=2, enable_dp_attention=True)[0] == wanted
    assert "captured decode steps of 1, 2, 4 requests" in caplog.text


def test_what_is_not_captured_is_told(two_gpus: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(MOE, tmp_path / "model")
    wanted, *_ = tokens(folder, two_gpus)
    with caplog.at_level(logging.INFO):
        assert tokens(folder, two_gpus, tp_size=2, ep_size=2, moe_a2a_backend="torch")[0] == wanted
        assert tokens(folder, two_gpus, pp_size=2)[0] == wanted
    assert "how many rows come to their experts (--moe-a2a-backend)" in caplog.text
    assert "stages hand on rows behind each of them (--pp-size)" in caplog.text
