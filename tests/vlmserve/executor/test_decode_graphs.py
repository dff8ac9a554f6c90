"""Decode steps by graphs: the same answers as without, whatever runs together; and nothing is written that is not
theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_graphs import CallsAgain, Recorder
from tests.tiny_checkpoints import FAMILIES, HYBRID, make_checkpoint
from tests.vlmserve.executor.captured import capture_steps
from tests.vlmserve.executor.paged_backend import PagedBackend
from tests.vlmserve.models.batches import forward_batch
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine.graph_planning import batch_sizes
from vlmserve.executor.cuda_graphs import DecodeGraphs
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.registry import load_model

CPU = torch.device("cpu")
OFTEN = ("qwen3_vl", HYBRID)
ROWS, CONTEXT, SIZES = 7, 24, (1, 2, 4, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_checkpoint(family, tmp_path_factory.mktemp(family)) for family in (*FAMILIES, HYBRID)}


class Bench:
    """A model with a full KV cache, of which any requests may decode. Request row r has slots in no order."""

    def __init__(
        self,
        folder: Path,
        backend: AttentionBackend,
        capturer: CallsAgain | Recorder,
    ) -> None:
        self.model = load_model(folder, dtype=torch.float32)
        config = self.model.config
        generator = torch.Generator().manual_seed(3)
        self.cache = KVCache(
            num_slots=1 + ROWS * CONTEXT,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        for layer in self.cache.layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
        self.pool = ReqToTokenPool(ROWS, CONTEXT, CPU)
        self.pool.req_to_token[:ROWS] = 1 + torch.randperm(ROWS * CONTEXT, generator=generator).view(ROWS, CONTEXT)
        self.backend = backend
        self.capturer = capturer
        self.graphs = DecodeGraphs(
            SIZES[-1],
            model=self.model,
            kv_cache=self.cache,
            req_to_token_pool=self.pool,
            attn_backend=backend,
            capturer=capturer,
        )
        self.graphs.capture(SIZES)

    def step(self, requests: list[tuple[int, int]], seed: int) -> ForwardBatch:
        """requests: row and length of each."""
        generator = torch.Generator().manual_seed(seed)
        rows, count = [row for row, _ in requests], len(requests)
        return forward_batch(
            self.backend,
            self.pool,
            self.cache,
            rows,
            [(length - 1, 1) for _, length in requests],
            input_ids=torch.randint(100, (count,), generator=generator),
            positions=torch.randint(200, (3, count), generator=generator),
        )

    def replay(self, step: ForwardBatch) -> torch.Tensor:
        size = self.graphs.size_for([step])
        assert size is not None
        return self.graphs.run(step, size)

    @torch.inference_mode()
    def eager(self, step: ForwardBatch) -> torch.Tensor:
        step.attn_backend.init_forward_metadata(step)
        return self.model.forward(self.model.embed_tokens(step.input_ids), step.positions, step)

    def kept(self) -> list[torch.Tensor]:
        """All of the cache but what padding may write to."""
        return [part[1:].clone() for layer in self.cache.layers for part in (layer.keys, layer.values)]


_REQUESTS = st.lists(st.sampled_from(range(ROWS)), min_size=1, max_size=ROWS, unique=True).flatmap(
    lambda rows: st.tuples(*(st.tuples(st.just(row), st.integers(1, CONTEXT)) for row in rows)).map(list)
)


@pytest.fixture(scope="module", params=[CallsAgain, Recorder])
def bench(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Bench:
    return Bench(folders["qwen3_vl"], PagedBackend(), request.param())


@given(steps=st.lists(_REQUESTS, min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_a_replay_is_the_step(bench: Bench, steps: list[list[tuple[int, int]]], seed: int) -> None:
    for requests in steps:
        step = bench.step(requests, seed)
        before, replayed = bench.kept(), bench.capturer.replayed
        got = bench.replay(step).clone()
        assert bench.capturer.replayed == replayed + 1
        assert bench.backend._size == next(size for size in SIZES if size >= len(requests))
        by_graph = bench.kept()
        torch.testing.assert_close(got, bench.eager(step), atol=1e-4, rtol=1e-4)
        for was, graph, eager in zip(before, by_graph, bench.kept(), strict=True):
            torch.testing.assert_close(graph, eager, atol=1e-5, rtol=1e-5)
            graph[step.out_cache_loc - 1] = was[step.out_cache_loc - 1]
            assert torch.equal(was, graph)


def test_the_smallest_size_that_holds_all(bench: Bench) -> None:
    def size_of(*counts: int) -> int | None:
        return bench.graphs.size_for([bench.step([(row, 3) for row in range(count)], 0) for count in counts])

    assert [size_of(count) for count in (1, 2, 3, ROWS)] == [1, 2, 4, ROWS]
    assert size_of(1, 3, 2) == 4
    assert size_of(1, ROWS + 1) is None
    step = bench.step([(0, 3), (1, 4)], 0)
    assert bench.graphs.size_for([step, dataclasses.replace(step, forward_mode=ForwardMode.MIXED)]) is None


def test_who_joins_touches_nothing_but_padding(bench: Bench) -> None:
    replayed = bench.capturer.replayed
    bench.replay(bench.step([(0, 3), (1, 4)], 0))
    before = bench.kept()
    bench.graphs.join(4)
    assert bench.capturer.replayed == replayed + 2
    for was, now in zip(before, bench.kept(), strict=True):
        assert torch.equal(was, now)


@torch.inference_mode()
def test_a_step_takes_two_launches_beside_its_replay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = torch._foreach_copy_

    def copy(targets: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        # what a GPU wants of tensors that it is to copy in one launch
        assert len({tensor.dtype for tensor in targets + given}) == 1
        assert all(tensor.is_contiguous() for tensor in targets + given)
        calls.append(len(targets))
        plain(targets, given)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    static = bench.graphs._graphs[4][0]
    for requests in ([(0, 3), (1, 4), (2, 5)], [(3, 3), (1, 4), (2, 5), (5, 1)]):
        step = bench.step(requests, 0)
        calls.clear()
        loaded = bench.graphs.load(static, step)
        assert len(calls) == 2
        assert loaded.input_ids.tolist() == [*step.input_ids.tolist(), 0][:4]
        assert loaded.req_pool_indices.tolist() == [*step.req_pool_indices.tolist(), ROWS][:4]
        assert loaded.out_cache_loc.tolist() == [*step.out_cache_loc.tolist(), 0][:4]
        assert loaded.seq_lens.tolist() == [*step.seq_lens.tolist(), 1][:4]
        assert loaded.extend_start_loc.tolist() == [0, 1, 2, 3, 4]
        assert loaded.positions.is_contiguous()
        assert loaded.positions[:, : len(requests)].equal(step.positions)


NEW = 14
PICTURE = np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8)
QUESTIONS = [
    "Count.",
    "What is in the picture on the left side?",
    "Name a colour.",
    "Why?",
    "Two circles",
    "Left, right",
]


def answers(llm: LLM) -> Iterator[tuple[int, ...]]:
    """Requests that join and leave at different times."""
    sampling = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    asked = [
        [{"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": question}]}]
        if number % 2
        else [{"role": "user", "content": question * (1 + 3 * number)}]
        for number, question in enumerate(QUESTIONS)
    ]
    yield from (done.token_ids for done in llm.chat_batch(asked, sampling))
    for count in (3, 9):
        shorter = dataclasses.replace(sampling, max_new_tokens=count)
        yield from (done.token_ids for done in llm.chat_batch(asked[:count], shorter))
    warm = dataclasses.replace(sampling, temperature=1.0, seed=5, repetition_penalty=1.2)
    yield llm.chat(asked[1], warm).token_ids


@pytest.mark.parametrize(
    "family",
    [family if family in OFTEN else pytest.param(family, marks=pytest.mark.slow) for family in (*FAMILIES, HYBRID)],
)
def test_the_same_tokens_with_and_without(folders: dict[str, Path], family: str) -> None:
    # room for fewer requests than there are, and for less than these need in the end: some are taken back
    pools = {"max_running_requests": 5, "max_total_tokens": 320, "page_size": 4, "schedule_conservativeness": 0.1}
    with LLM(str(folders[family]), num_threads=1, cpu_kernels="off", **pools) as llm:
        wanted = list(answers(llm))
        capturer = Recorder()
        llm.flush_cache()
        capture_steps(llm, batch_sizes(3), capturer)  # steps of four and five are computed as ever
        assert list(answers(llm)) == wanted
        assert capturer.replayed > NEW
        states = llm._runner.recurrent_cache
        assert (states is None) == (family != HYBRID)
        if states is not None:
            assert not states.recurrent[0].any()
            assert states.recurrent[-1].any()
