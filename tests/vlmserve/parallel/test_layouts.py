"""However processes share a model, and however its steps are scheduled, the answers are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fp8_checkpoints import make_fp8
from tests.quantized_checkpoints import make_quantized
from tests.tiny_checkpoints import ALL_FAMILIES, FAMILIES, HYBRID_MOE, HYBRIDS, MOE, STREAMED, make_checkpoint
from tests.vlmserve.models.test_fp8_experts import make_fp8_experts
from tests.vlmserve.parallel.sharing import EVERYTHING, GREEDY, LAYERS, PENALTIES, SETTINGS, assert_alike
from tests.vlmserve.reference import conversations
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine.step import OneGroup
from vlmserve.executor.model_worker_batch import ModelWorkerBatch
from vlmserve.ipc.messages import GrammarSpec
from vlmserve.models.qwen4_exp.ngrams import NGramTable
from vlmserve_common.compute.expert_part import first_placement
from vlmserve_common.compute.experts import SparseMLP

HIDDEN = 64
SAMPLED = SamplingOverrides(temperature=0.9, top_p=0.8, max_new_tokens=6, ignore_eos=True, seed=3)
DIGITS = SamplingOverrides(temperature=0.0, max_new_tokens=6, grammar=GrammarSpec(kind="regex", text="[0-9]{3}"))

SPARSE, RECURRENT = (MOE, HYBRID_MOE, STREAMED), (*HYBRIDS, STREAMED)
EVERY = (*ALL_FAMILIES, *RECURRENT)
QUANTIZED = ("awq", "gptq", "compressed-tensors", "fp8")
TP, PP = {"tp_size": 2}, {"pp_size": 2}
SUMS, ROWS = ({"tp_size": 2, "ep_size": 2, "moe_a2a_backend": how} for how in ("none", "torch"))
GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
MOVING = {"enable_eplb": True, "ep_num_redundant_experts": 4, "eplb_rebalance_num_iterations": 5}
STEP_BY_STEP = {"disable_overlap_schedule": True}

QUICK = [
    ("qwen3_vl", TP),
    ("qwen3_vl", PP),
    (HYBRID_MOE, PP | STEP_BY_STEP),
]
# What shares a model, and the families that can be shared so.
LAYOUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (TP, EVERY),
    (PP, EVERY),
    (TP | PP, EVERY),
    (SUMS, SPARSE),
    (ROWS, SPARSE),
    (GROUPS, EVERY),
    (ROWS | PP, SPARSE),
    (GROUPS | SUMS, SPARSE),
    (GROUPS | ROWS, SPARSE),
]
SCHEDULES: list[dict[str, Any]] = [
    {},
    STEP_BY_STEP,
    {"enable_mixed_chunk": False, "chunked_prefill_size": 16},
    {"encoder_dp_size": 2},
]
ONCE: list[tuple[str, dict[str, Any]]] = [
    (MOE, ROWS | MOVING),
    ("qwen3_vl", {"pp_size": 3, "encoder_dp_size": 1}),
    ("qwen3_vl", PP | {"chunked_prefill_size": 4}),
    ("qwen3_vl", PP | {"speculative_algorithm": "ngram"}),
    (STREAMED, PP | {"speculative_algorithm": "ngram"}),
    (MOE, ROWS),
    (MOE, SUMS | MOVING),
    (MOE, GROUPS | SUMS | MOVING),
    (MOE, GROUPS | ROWS | MOVING),
    (MOE, GROUPS | ROWS | {"tp_size": 4}),
    (MOE, GROUPS | {"mm_encoder_tp_mode": "data"}),
    *((family, sizes) for family in QUANTIZED for sizes in (TP, TP | PP)),
    *(("fp8 experts", sizes) for sizes in (TP, ROWS, ROWS | PP)),
    *(("awq experts", sizes) for sizes in (TP, SUMS | MOVING, ROWS | PP)),
]


def cells() -> list[Any]:
    """Make a test of each cell, once. Each family has each layout twice, the second time with another schedule: all
    pairs of a layout and a schedule come, and all pairs of a family and a schedule."""
    product = [
        (family, how | schedule)
        for row, (how, families) in enumerate(LAYOUTS)
        for column, family in enumerate(families)
        for schedule in (SCHEDULES[0], SCHEDULES[1 + (row + column) % (len(SCHEDULES) - 1)])
    ]
    rows = {name_of_cell(*cell): cell for cell in [*QUICK, *ONCE, *product]}
    return [
        pytest.param(*cell, id=name, marks=() if cell in QUICK else pytest.mark.slow) for name, cell in rows.items()
    ]


def name_of_cell(family: str, settings: dict[str, Any]) -> str:
    return " ".join([family, *(f"{name}={value}" for name, value in sorted(settings.items()))])


def make_folder(family: str, base: Path) -> Path:
    """Make a checkpoint; of hybrids, with layers of both kinds in each of two stages."""
    if family == "fp8 experts":
        return make_fp8_experts(base, "each")[0]
    if family == "awq experts":
        plain = make_checkpoint(MOE, base / "plain", sizes={"moe_intermediate_size": 128})
        return make_quantized(plain, base, "awq")[0]
    if family not in QUANTIZED:
        return make_checkpoint(family, base / "model", mixers=("linear_attention", "full_attention") * 2)
    plain = make_checkpoint("qwen2_5_vl", base / "plain")
    return (
        make_fp8(plain, base, "block", block=(8, 8))[0] if family == "fp8" else make_quantized(plain, base, family)[0]
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list]]:
    """A family's folder, and what one process answers."""

    @cache
    def of(family: str) -> tuple[Path, list]:
        folder = make_folder(family, tmp_path_factory.mktemp("alone"))
        with started(folder) as llm:
            return folder, answers(llm, finds_prefixes=family not in RECURRENT)

    return of


def started(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), dtype="float32", enable_return_hidden_states=True, **SETTINGS | settings)


def answers(llm: LLM, *, finds_prefixes: bool) -> list:
    """Pictures and texts, alone and together: chunks beside decoding, steps in flight, cached prefixes, penalties,
    samples, a grammar, and last of all a prompt with its logprobs and hidden states."""
    asked = conversations()
    together = llm.chat_batch(asked, GREEDY, num_logprobs=2)
    again = llm.chat_batch(asked[:3], GREEDY, num_logprobs=2)
    if finds_prefixes:
        assert sum(one.cached_tokens for one in again) > sum(one.cached_tokens for one in together[:3])
    others = [one for how in (PENALTIES, SAMPLED, DIGITS) for one in llm.chat_batch(asked[:3], how, num_logprobs=2)]
    scored = [llm.chat(asked[which], GREEDY, num_logprobs=2, returns=EVERYTHING) for which in (5, 3)]
    stats = llm.stats()
    for group in stats.replicas or [stats]:
        assert group.forward_steps_total > 0
        assert group.kv_free_tokens + group.kv_cached_tokens == group.kv_total_tokens
        assert group.req_pool_free == group.req_pool_total
    return [*together, *again, *others, *scored]


class Counting:
    """A worker that counts tokens, and rows of pictures."""

    def __init__(self, worker) -> None:
        self._worker = worker
        self.tokens = self.rows = 0

    def forward(self, batch: ModelWorkerBatch):
        self.tokens += len(batch.input_ids)
        self.rows += sum(len(part.embeds) for part in batch.mm_embeds)
        assert (batch.input_ids >= 0).all(), "a token that only another stage knows"
        return self._worker.forward(batch)

    def sample(self, forwarded, info):
        return self._worker.sample(forwarded, info)


@pytest.mark.parametrize(("family", "settings"), cells())
def test_the_answers_are_those_of_one_process(family: str, settings: dict[str, Any], alone):
    folder, expected = alone(family)
    staged, grouped = "pp_size" in settings, "dp_size" in settings
    with started(folder, **settings) as llm:
        if staged:
            counted = Counting(llm.engine.loop.worker.worker)
            llm.engine.loop.worker = OneGroup(counted)
        got = answers(llm, finds_prefixes=family not in RECURRENT and not grouped)
        if "enable_eplb" in settings:
            assert_experts_moved(llm, grouped)
        if grouped:
            assert len(llm.stats().replicas) == 2
            assert llm.stats().encoder.encoded == 5, "groups have one encoder"
        elif not staged:
            assert_sums_added(llm, rows_sent=settings.get("moe_a2a_backend") == "torch")
        elif family in ALL_FAMILIES:
            assert_rows_handed_on(llm, counted, deepstack=family in ("qwen3_vl", MOE))
        if family in FAMILIES and settings == TP:
            assert llm._runner.kv_cache.layers[0].keys.shape[1] == 1
            assert llm._runner.model.language_model._packed is not None, "layers one by one"
    assert_alike(expected, got)
    for one, other in zip(got[-2:], expected[-2:], strict=True):
        assert one.hidden_states == pytest.approx(other.hidden_states, abs=1e-4)
        assert one.prompt_logprobs.logprobs == pytest.approx(other.prompt_logprobs.logprobs, abs=1e-4, nan_ok=True)
        assert (one.prompt_logprobs.top_ids == other.prompt_logprobs.top_ids).all()


def assert_sums_added(llm: LLM, *, rows_sent: bool) -> None:
    """Two sums a layer, and one of the embedding and of each table of n-grams; none of experts that rows are sent to,
    but for a shared one."""
    counts, stats = llm.engine.ranks.group.counts, llm.stats()
    experts = [part for part in llm._runner.model.modules() if isinstance(part, SparseMLP)] if rows_sent else []
    sparse, shared = len(experts), sum(getattr(part, "shared_expert", None) is not None for part in experts)
    tables = sum(isinstance(part, NGramTable) for part in llm._runner.model.modules())
    sums = 2 * len(llm._runner.model.language_model.layers) + 1 + tables - (sparse - shared)
    assert counts["all_reduce"] == stats.forward_steps_total * sums + stats.experts.rebalances_total
    if stats.experts.rebalances_total == 0:  # which moves weights in the same way
        assert counts["all_to_all"] == stats.forward_steps_total * sparse * 4
        assert counts["all_gather"] == stats.forward_steps_total * sparse


def assert_experts_moved(llm: LLM, grouped: bool) -> None:
    """Every fifth step, also in the midst of answers."""
    stats = llm.stats()
    assert stats.experts.moved_total > 0
    assert stats.experts.imbalance >= stats.experts.imbalance_after >= 1
    first = next(mlp for mlp in llm._runner.model.modules() if isinstance(mlp, SparseMLP))
    assert len(first.slots.placement) == 12
    assert sorted(set(first.slots.placement)) == list(range(8))
    assert first.slots.placement != first_placement(8, llm._runner.model.config.shard)
    if not grouped:
        assert stats.experts.rebalances_total == (stats.forward_steps_total - 1) // 5


def assert_rows_handed_on(llm: LLM, counted: Counting, *, deepstack: bool) -> None:
    """Only what the next stage needs goes there: a row of each token, and one of each row of a picture for each of its
    layers that has DeepStack's, of which there are two rows, the second for layer 1."""
    ranks = llm.engine.ranks
    own = len(ranks.shard.stage.layers(LAYERS))
    later = max(0, 2 - own) if deepstack else 0
    assert len(llm._runner.kv_cache.layers) == own
    assert counted.rows > 0
    assert ranks.comm.behind.bytes["send"] == (counted.tokens + later * counted.rows) * HIDDEN * 4


@pytest.mark.slow
def test_requests_that_give_their_places_up_go_on_as_if_nothing_had_happened(tmp_path: Path):
    folder = make_checkpoint("qwen2_vl", tmp_path / "m")
    long = replace(GREEDY, max_new_tokens=90, ignore_eos=False)  # else they are sure to have places
    found = []
    settings = {"max_total_tokens": 360, "chunked_prefill_size": 256, "schedule_conservativeness": 0.01}
    for sizes in ({}, PP):
        with started(folder, **settings, **sizes) as llm:
            found.append(llm.chat_batch(["abcdefgh"[:i] for i in range(1, 9)], long, num_logprobs=1))
            assert llm.stats().retracted_total > 0
    assert_alike(*found)
