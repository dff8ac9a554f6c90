"""Stages that have a model's layers one after another answer as one process that has them all."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_checkpoints import HYBRID, MOE, make_checkpoint
from tests.vlmserve.parallel.test_tensor_parallel import (
    EVERYTHING,
    GREEDY,
    PENALTIES,
    SETTINGS,
    answer_of,
    assert_alike,
    name_of,
    serving,
)
from tests.vlmserve.reference import conversations
from vlmserve import LLM, SamplingOverrides
from vlmserve.commands.bench.processes import children_of
from vlmserve.config.checks import SettingsError, check_engine_args
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.step import OneGroup
from vlmserve.executor.model_worker_batch import ModelWorkerBatch
from vlmserve.ipc.messages import GrammarSpec
from vlmserve_common.errors import DeviceLostError, EngineError

HIDDEN, LAYERS = 64, 3
SAMPLED = SamplingOverrides(temperature=0.9, top_p=0.8, max_new_tokens=6, ignore_eos=True, seed=3)
DIGITS = SamplingOverrides(temperature=0.0, max_new_tokens=6, grammar=GrammarSpec(kind="regex", text="[0-9]{3}"))


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


def answers(llm: LLM, *, finds_prefixes: bool = True) -> list:
    asked = conversations()
    together = llm.chat_batch(asked, GREEDY, num_logprobs=2)
    again = llm.chat_batch(asked[:3], GREEDY, num_logprobs=2)
    found = sum(one.cached_tokens for one in again) > sum(one.cached_tokens for one in together[:3])
    assert found == finds_prefixes
    others = [one for how in (PENALTIES, SAMPLED, DIGITS) for one in llm.chat_batch(asked[:3], how, num_logprobs=2)]
    scored = llm.chat(asked[3], GREEDY, num_logprobs=2, returns=EVERYTHING)
    stats = llm.stats()
    assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
    assert stats.req_pool_free == stats.req_pool_total
    return [*together, *again, *others, scored]


def compare(alone: list, staged: list) -> None:
    assert_alike(alone, staged)
    alone, staged = alone[-1], staged[-1]
    assert staged.hidden_states == pytest.approx(alone.hidden_states, abs=1e-4)
    assert staged.prompt_logprobs.logprobs == pytest.approx(alone.prompt_logprobs.logprobs, abs=1e-4, nan_ok=True)
    assert (staged.prompt_logprobs.top_ids == alone.prompt_logprobs.top_ids).all()


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_vl", {"pp_size": 2}),
        pytest.param("qwen3_vl", {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
        pytest.param(MOE, {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_vl", {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"pp_size": 3, "encoder_dp_size": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"pp_size": 2, "disable_overlap_schedule": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"pp_size": 2, "enable_mixed_chunk": False}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"pp_size": 2, "chunked_prefill_size": 4}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"pp_size": 2, "speculative_algorithm": "ngram"}, marks=pytest.mark.slow),
    ],
)
def test_the_same_answers_as_alone(family: str, sizes: dict, tmp_path: Path):
    """And only what the next stage needs goes there: a row of each token, and one of each row of a picture for each of
    its layers that has DeepStack's."""
    # two rows of DeepStack, of which the second is for layer 1
    folder = make_checkpoint(family, tmp_path / family)
    settings = {"enable_return_hidden_states": True, **SETTINGS}
    with LLM(str(folder), **settings) as llm:
        alone = answers(llm)
    with LLM(str(folder), **{**settings, **sizes}) as llm:
        ranks = llm.engine.ranks
        loop = llm.engine.loop
        counted = Counting(loop.worker.worker)
        loop.worker = OneGroup(counted)
        compare(alone, answers(llm))
        own = len(ranks.shard.stage.layers(LAYERS))
        deepstack = max(0, 2 - own) if family in ("qwen3_vl", MOE) else 0
        assert len(llm._runner.kv_cache.layers) == own
        assert counted.rows > 0
        assert ranks.shard.stage.behind.bytes["send"] == (counted.tokens + deepstack * counted.rows) * HIDDEN * 4


@pytest.mark.slow
def test_requests_that_give_their_places_up_go_on_as_if_nothing_had_happened(tmp_path: Path):
    folder = make_checkpoint("qwen2_vl", tmp_path / "m")
    long = replace(GREEDY, max_new_tokens=90, ignore_eos=False)  # else they are sure to have places
    found = []
    settings = {**SETTINGS, "max_total_tokens": 360, "chunked_prefill_size": 256, "schedule_conservativeness": 0.01}
    for sizes in ({}, {"pp_size": 2}):
        with LLM(str(folder), **{**settings, **sizes}) as llm:
            found.append(llm.chat_batch(["abcdefgh"[:i] for i in range(1, 9)], long, num_logprobs=1))
            assert llm.stats().retracted_total > 0
    assert_alike(*found)


@pytest.mark.slow
def test_a_hybrid_in_stages(tmp_path: Path):
    """Recurrent states are where their layers are."""
    folder = make_checkpoint(HYBRID, tmp_path / "m", mixers=("linear_attention", "full_attention") * 2)
    found = []
    for sizes in ({}, {"pp_size": 2}):
        with LLM(str(folder), enable_return_hidden_states=True, **SETTINGS, **sizes) as llm:
            found.append(answers(llm, finds_prefixes=False))  # of fewer than 64 tokens no state is kept
    compare(*found)


def test_what_cannot_be_is_refused_at_once(tmp_path: Path):
    folder = make_checkpoint("qwen2_vl", tmp_path / "m")
    with pytest.raises(EngineError, match="--pp-size is 4: num_hidden_layers is 3, too few for so many stages"):
        LLM(str(folder), pp_size=4, **SETTINGS)
    with pytest.raises(SettingsError, match="--tp-size 2 times --pp-size 2 is 4; it must be a multiple of --nnodes"):
        check_engine_args(EngineArgs(model="m", tp_size=2, pp_size=2, nnodes=3, dist_init_addr="h:1"))
    with pytest.raises(SettingsError, match="--enable-hierarchical-cache does not go with --pp-size above 1 yet"):
        check_engine_args(EngineArgs(model="m", pp_size=2, enable_hierarchical_cache=True))
    folder = make_checkpoint(HYBRID, tmp_path / "h")
    with pytest.raises(EngineError, match=r"--pp-size is 2: layers 2 \.\. 2 are all of one kind"):
        LLM(str(folder), pp_size=2, **SETTINGS)


def test_a_stage_that_is_killed_is_named_and_nobody_waits(tmp_path: Path):
    folder = make_checkpoint("qwen2_vl", tmp_path / "m")
    with LLM(str(folder), pp_size=2, **SETTINGS) as llm:
        llm.chat("Name a colour.", GREEDY)
        (rank,) = (pid for pid in children_of(os.getpid()) if name_of(pid) == "rank-1")
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(DeviceLostError, match="the process of rank 1 was killed by SIGKILL"):
            llm.chat("Name a colour.", GREEDY)


@pytest.mark.slow
def test_a_server_of_two_stages_answers_and_ends(tmp_path: Path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "m")
    with LLM(str(folder), **SETTINGS) as llm:
        alone = llm.chat("Name a colour.", GREEDY)
    server = serving(folder, tmp_path / "run", "--tensor-parallel-size", "1", "--pipeline-parallel-size", "2")
    try:
        assert answer_of(server) == alone.text
        (rank,) = (pid for pid in children_of(server.process.pid) if name_of(pid) == "rank-1")
        os.kill(rank, signal.SIGKILL)
        assert server.wait() == 1
        assert "stopped: the rank-1 process was killed by SIGKILL" in "".join(server.log)
    finally:
        server.end()
