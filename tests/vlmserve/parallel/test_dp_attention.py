"""Groups of ranks that have requests of their own, and share all but attention, answer as one process does."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import pytest

from tests.tiny_checkpoints import HYBRID, HYBRID_MOE, MOE, make_checkpoint
from tests.vlmserve.parallel.test_expert_parallel import DENSE_LAYERS
from tests.vlmserve.parallel.test_tensor_parallel import (
    EVERYTHING,
    GREEDY,
    LAYERS,
    PENALTIES,
    SETTINGS,
    assert_alike,
    serving,
)
from tests.vlmserve.reference import conversations
from vlmserve import LLM
from vlmserve.config.checks import SettingsError, check_engine_args
from vlmserve.config.engine_args import EngineArgs
from vlmserve.ipc.routing.sums import replicas_of
from vlmserve_common.compute.token_exchange import TokenExchange, TokenLayout
from vlmserve_common.errors import EngineError

TWO_GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
SUMS_ADDED, ROWS_SENT = {"moe_a2a_backend": "none"}, {"moe_a2a_backend": "torch"}
MOVING = {"enable_eplb": True, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 5}
HIDDEN, WIDTH = 64, 4  # of the tiny models, and bytes of a float32


def answers_of(folder: Path, **settings) -> list:
    """Of many at a time, and of one after another while the other group has nothing to do."""
    with LLM(str(folder), enable_return_hidden_states=True, **settings, **SETTINGS) as llm:
        asked = conversations()
        together = llm.chat_batch(asked, GREEDY, num_logprobs=2)
        penalised = llm.chat_batch(asked[:4], PENALTIES, num_logprobs=2)
        scored = [llm.chat(asked[which], GREEDY, num_logprobs=2, returns=EVERYTHING) for which in (3, 5)]
        stats = llm.stats()
        for group in replicas_of(stats):
            assert group.forward_steps_total > 0
            assert group.kv_free_tokens + group.kv_cached_tokens == group.kv_total_tokens == 2048
            assert group.req_pool_free == group.req_pool_total
        assert len(replicas_of(stats)) == (2 if settings else 0)
        assert stats.encoder.encoded == 5, "groups have one encoder"
        if "enable_eplb" in settings:
            assert stats.experts.moved_total > 0
        return [*together, *penalised, *scored]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list]]:
    """A family's checkpoint, and what one process answers by it."""

    @cache
    def of(family: str) -> tuple[Path, list]:
        folder = make_checkpoint(family, tmp_path_factory.mktemp(family) / "model")
        return folder, answers_of(folder)

    return of


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(MOE, {"ep_size": 2} | ROWS_SENT, id="rows are sent"),
        pytest.param(MOE, {"ep_size": 2} | SUMS_ADDED, id="sums are added up", marks=pytest.mark.slow),
        pytest.param(MOE, {"tp_size": 4, "ep_size": 2} | ROWS_SENT, id="groups of two ranks", marks=pytest.mark.slow),
        pytest.param(
            MOE, {"enable_mixed_chunk": True}, id="each expert is cut, prompts beside answers", marks=pytest.mark.slow
        ),
        pytest.param("qwen3_vl", {"disable_overlap_schedule": True}, id="dense, step by step"),
        pytest.param(HYBRID, {}, id="hybrid", marks=pytest.mark.slow),
        pytest.param(HYBRID_MOE, {"ep_size": 2} | SUMS_ADDED, id="hybrid, sums", marks=pytest.mark.slow),
        pytest.param(HYBRID_MOE, {"ep_size": 2} | ROWS_SENT, id="hybrid, rows", marks=pytest.mark.slow),
        pytest.param(MOE, {"mm_encoder_tp_mode": "data"}, id="encoder processes", marks=pytest.mark.slow),
        pytest.param(MOE, {"ep_size": 2} | ROWS_SENT | MOVING, id="experts move", marks=pytest.mark.slow),
        pytest.param(MOE, {"ep_size": 2} | SUMS_ADDED | MOVING, id="experts move, sums", marks=pytest.mark.slow),
    ],
)
def test_the_same_answers_as_alone(family: str, settings: dict, alone: Callable[[str], tuple[Path, list]]):
    folder, expected = alone(family)
    got = answers_of(folder, **TWO_GROUPS | settings)
    assert_alike(got, expected)
    for one, other in zip(got[-2:], expected[-2:], strict=True):
        assert one.hidden_states == pytest.approx(other.hidden_states, abs=1e-4)
        assert one.prompt_logprobs.logprobs == pytest.approx(other.prompt_logprobs.logprobs, abs=1e-4, nan_ok=True)
        assert (one.prompt_logprobs.top_ids == other.prompt_logprobs.top_ids).all()


@contextmanager
def layouts_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TokenLayout]]:
    """Of what this process exchanges from here on."""
    found: list[TokenLayout] = []
    among = TokenExchange.among

    @contextmanager
    def noting(self: TokenExchange, sizes) -> Iterator[TokenLayout]:
        with among(self, sizes) as layout:
            found.append(layout)
            yield layout

    with monkeypatch.context() as patched:
        patched.setattr(TokenExchange, "among", noting)
        yield found


@pytest.mark.parametrize("family", ["qwen3_vl", MOE])
def test_no_more_is_moved_than_said(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ids and rows of all tokens for the embedding, rows twice for each MLP, and those of sampled tokens for the head;
    where rows are sent to experts, nothing is brought together for these."""
    more = {"ep_size": 2} if family == MOE else {}
    shared = DENSE_LAYERS if family == MOE else LAYERS
    with LLM(str(make_checkpoint(family, tmp_path / "model")), **TWO_GROUPS, **more, **SETTINGS) as llm:
        group = llm.engine.ranks.group
        group.counts.clear()
        group.bytes.clear()
        with layouts_noted(monkeypatch) as layouts:
            llm.chat_batch(conversations()[:3], GREEDY)
        counts, moved = Counter(group.counts), Counter(group.bytes)
    steps, sampled = layouts[::2], layouts[1::2]  # chunks are as long as prompts here: each step is sampled
    assert {layout.padded for layout in steps} == {True, False}
    expected, expected_counts = Counter(), Counter()
    for layout in steps:
        gathering, scattering = ("all_gather", "reduce_scatter") if layout.padded else ("all_reduce", "all_reduce")
        row = HIDDEN * WIDTH
        expected[gathering] += layout.rows * (8 + shared * row)
        expected[scattering] += layout.rows * (1 + shared) * row
        expected_counts[gathering] += 1 + shared
        expected_counts[scattering] += 1 + shared
    for layout in sampled:
        gathering = "all_gather" if layout.padded else "all_reduce"
        expected[gathering] += layout.rows * HIDDEN * WIDTH
        expected_counts[gathering] += 1
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        assert counts[name] == expected_counts[name], name
        assert moved[name] == expected[name], name
    assert counts["all_to_all"] == (len(steps) * (LAYERS - DENSE_LAYERS) * 4 if family == MOE else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 2}, "--dp-size is 1; it must be 2 or more with --enable-dp-attention, and divide --tp-size"),
        ({"tp_size": 4, "dp_size": 3}, "--dp-size is 3; it must be .* divide --tp-size, which is 4"),
        ({"tp_size": 2, "dp_size": 2, "enable_hierarchical_cache": True}, "--enable-hierarchical-cache does not go"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict, message: str):
    with pytest.raises(SettingsError, match=message):
        check_engine_args(EngineArgs(model="m", enable_dp_attention=True, **settings))


def test_models_that_cannot_be_shared_so_are_refused_at_once(tmp_path: Path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "dense")
    with pytest.raises(EngineError, match="--tp-size / --dp-size is 3: num_attention_heads is 4"):
        LLM(str(folder), **TWO_GROUPS | {"tp_size": 6}, **SETTINGS)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_answers_by_each_group(nodes: int, tmp_path: Path):
    folder = make_checkpoint(MOE, tmp_path / "model")
    with LLM(str(folder), **SETTINGS) as llm:
        alone = llm.chat("Name a colour.", GREEDY)
    words = ["--dp-size", "2", "--enable-dp-attention", "--ep-size", "2"]
    if nodes == 2:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            words += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{probe.getsockname()[1]}"]
    servers = [
        serving(folder, tmp_path / f"{node}", *words, "--node-rank", str(node)) for node in reversed(range(nodes))
    ]
    try:
        client = servers[-1].client()
        model = client.models.list().data[0].id
        for group in (0, 1, None):
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Name a colour."}],
                temperature=0.0,
                max_tokens=8,
                extra_body={"ignore_eos": True, "data_parallel_rank": group},
            )
            assert answer.choices[0].message.content == alone.text
        metrics = httpx.get(str(client.base_url).removesuffix("/v1/") + "/metrics").text
        for group in range(2):
            (line,) = re.findall(rf'replica_generation_tokens_total{{.*replica="{group}"}} (.*)', metrics)
            assert float(line) >= 8
    finally:
        for server in servers:
            server.end()
