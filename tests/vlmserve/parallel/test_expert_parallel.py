"""Processes that share experts answer as one that has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_checkpoints import MOE, make_checkpoint
from tests.vlmserve.parallel.test_tensor_parallel import GREEDY, LAYERS, SETTINGS, assert_alike
from tests.vlmserve.reference import conversations
from vlmserve import LLM
from vlmserve.config.checks import SettingsError, check_engine_args
from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.compute.expert_part import first_placement
from vlmserve_common.compute.experts import SparseMLP
from vlmserve_common.errors import EngineError

DENSE_LAYERS = 1
WAYS = {
    "experts are cut": {},
    "sums are added up": {"ep_size": 2, "moe_a2a_backend": "none"},
    "rows are sent": {"ep_size": 2, "moe_a2a_backend": "torch"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(MOE, tmp_path_factory.mktemp(MOE) / "model")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list:
    with LLM(str(folder), **SETTINGS) as llm:
        return llm.chat_batch(conversations(), GREEDY, num_logprobs=2)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_answers_as_alone(way: str, folder: Path, alone: list):
    with LLM(str(folder), tp_size=2, **WAYS[way], **SETTINGS) as llm:
        assert_alike(llm.chat_batch(conversations(), GREEDY, num_logprobs=2), alone)
        steps = llm.stats().forward_steps_total
        counts = llm.engine.ranks.group.counts
        sparse = LAYERS - DENSE_LAYERS
        if way == "rows are sent":
            assert counts["all_reduce"] == steps * (LAYERS + DENSE_LAYERS + 1)
            assert counts["all_gather"] == steps * sparse
            assert counts["all_to_all"] == steps * sparse * 4
        else:
            assert counts["all_reduce"] == steps * (2 * LAYERS + 1)
            assert counts["all_to_all"] == 0


@pytest.mark.parametrize("a2a", ["none", "torch"])
def test_the_same_answers_when_experts_move_and_have_copies(a2a: str, folder: Path, alone: list):
    """Every fifth step, also in the midst of answers."""
    eplb = {"enable_eplb": True, "ep_num_redundant_experts": 4, "eplb_rebalance_num_iterations": 5}
    with LLM(str(folder), tp_size=2, ep_size=2, moe_a2a_backend=a2a, **eplb, **SETTINGS) as llm:
        assert_alike(llm.chat_batch(conversations(), GREEDY, num_logprobs=2), alone)
        first, *_ = (mlp for mlp in llm._runner.model.modules() if isinstance(mlp, SparseMLP))
        assert len(first.slots.placement) == 12
        assert sorted(set(first.slots.placement)) == list(range(8))
        assert first.slots.placement != first_placement(8, llm._runner.model.config.shard)
        stats = llm.stats()
        assert stats.experts.rebalances_total == (stats.forward_steps_total - 1) // 5
        assert stats.experts.moved_total > 0
        assert stats.experts.imbalance >= stats.experts.imbalance_after >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 2, "ep_size": 3}, "--ep-size is 3; it must be a divisor of --tp-size, which is 2"),
        ({"tp_size": 2, "enable_eplb": True}, "--enable-eplb moves experts between the parties of --ep-size"),
        ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts is 2; it must be 0 without --enable-eplb"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict, message: str):
    with pytest.raises(SettingsError, match=message):
        check_engine_args(EngineArgs(model="m", **settings))


def test_a_dense_model_has_no_experts_to_share(tmp_path: Path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    with pytest.raises(EngineError, match="--ep-size is 2: qwen3_vl models have no experts"):
        LLM(str(folder), tp_size=2, ep_size=2, **SETTINGS)
