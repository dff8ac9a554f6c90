"""What FlashInfer is told of a step, with a fake of it that attends over the tables it is given."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve.models.attention import fake_flashinfer
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention import choice
from vlmserve.models.attention.base import AttentionBackend, AttentionSpec
from vlmserve.models.attention.flashinfer_backend import FlashInferAttentionBackend, lacks, workspace_bytes
from vlmserve.models.attention.torch_backend import TorchAttentionBackend

SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    scaling=0.2,
    dtype=torch.float16,
    cache_dtype=torch.float16,
    page_size=4,
    device=torch.device("cpu"),
)
REQUESTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def flashinfer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_flashinfer)
        yield


def spec(**changes):
    return dataclasses.replace(SPEC, **changes)


def agrees(backend, about, requests):
    got, want = (choice._attend(each, about, requests) for each in (backend, TorchAttentionBackend()))
    return torch.allclose(got, want, atol=2e-2 if about.dtype == torch.bfloat16 else 3e-3)


@settings(max_examples=20)
@given(requests=REQUESTS, page_size=st.sampled_from([1, 4, 5]), heads=st.sampled_from([(2, 2), (6, 2), (7, 1)]))
def test_prompts_and_mixed_steps(requests, page_size, heads):
    about = spec(page_size=page_size, num_heads=heads[0], num_kv_heads=heads[1])
    assert agrees(FlashInferAttentionBackend(about), about, requests)


@settings(max_examples=15)
@given(
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 5]),
    heads=st.sampled_from([(2, 2), (6, 2), (7, 1)]),
)
def test_decoding(prefixes, page_size, heads):
    about = spec(page_size=page_size, num_heads=heads[0], num_kv_heads=heads[1])
    backend = FlashInferAttentionBackend(about)
    fake_flashinfer.plans.clear()
    assert agrees(backend, about, [(prefix, 1) for prefix in prefixes])
    assert fake_flashinfer.plans == ["BatchDecodeWithPagedKVCacheWrapper"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_eight_bit_cache(dtype):
    about = spec(dtype=dtype, cache_dtype=torch.float8_e4m3fn)
    backend = FlashInferAttentionBackend(about)
    assert agrees(backend, about, [(9, 3), (0, 2)])
    assert agrees(backend, about, [(9, 1), (0, 1)])


class _Captured(AttentionBackend):
    """Steps as they are for CUDA graphs."""

    def __init__(self, backend):
        self.backend = backend
        self.init_forward_metadata = backend.init_graph_metadata
        self.forward = backend.forward

    def init_forward_metadata(self, forward_batch): ...

    def forward(self, *words): ...


def test_captured_kernels_read_the_same_buffers_whatever_the_step():
    backend = FlashInferAttentionBackend(SPEC)
    backend.init_graph_state(4, ReqToTokenPool(4, 40, torch.device("cpu")))
    captured = _Captured(backend)
    seen = {}
    for prefixes in ([3, 0, 25], [0, 11, 2], [7], [39, 39, 39, 39], [1, 1, 38], [20]):
        assert agrees(captured, SPEC, [(prefix, 1) for prefix in prefixes])
        wrapper = backend._current
        assert wrapper.use_cuda_graph
        where = [wrapper, *(buffer.data_ptr() for buffer in wrapper.buffers)]
        assert seen.setdefault(len(prefixes), where) == where
    assert len({tuple(where[1:]) for where in seen.values()}) == 1  # one set of buffers for all sizes
    assert agrees(backend, SPEC, [(3, 1)])
    assert not backend._current.use_cuda_graph


def test_longer_requests_than_the_buffers_were_made_for_are_not_written_behind_them():
    backend = FlashInferAttentionBackend(SPEC)
    backend.init_graph_state(1, ReqToTokenPool(1, 8, torch.device("cpu")))
    with pytest.raises(AssertionError, match="longer requests"):
        choice._attend(_Captured(backend), SPEC, [(12, 1)])


def test_the_next_plan_waits_for_the_last_one_to_be_copied(monkeypatch):
    said = []

    class Event:
        def synchronize(self):
            said.append("wait")

        def record(self, stream):
            said.append(f"record on {stream}")

    backend = FlashInferAttentionBackend(SPEC)
    backend._planned = Event()
    monkeypatch.setattr(fake_flashinfer, "plans", said)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    for requests in ([(3, 1)], [(3, 2)]):
        choice._attend(backend, SPEC, requests)
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    assert said == ["wait", decode, "record on cpu", "wait", prefill, "record on cpu"]


def test_a_cache_that_ends_within_a_page_is_read_by_slots(monkeypatch):
    whole = choice.KVCache
    monkeypatch.setattr(choice, "KVCache", lambda num_slots, **more: whole(num_slots=num_slots + 1, **more))
    backend = FlashInferAttentionBackend(SPEC)
    assert agrees(backend, SPEC, [(9, 3), (0, 1)])
    assert backend._page_size == 1


def test_tensor_cores_where_they_pay_and_where_there_is_no_other_kernel():
    def used(**changes):
        return FlashInferAttentionBackend(spec(**changes))._decode.use_tensor_cores

    assert [used(num_heads=group, num_kv_heads=1) for group in (1, 2, 3, 4, 6, 7, 8)] == [False] * 3 + [True] * 4
    assert used(cache_dtype=torch.float8_e4m3fn)


def test_workspaces_are_shared():
    backend = FlashInferAttentionBackend(SPEC)
    for largest, grows in ((2, False), (16384, True)):
        before = len(backend._workspace)
        backend.init_graph_state(largest, ReqToTokenPool(2, 40, torch.device("cpu")))
        assert (len(backend._workspace) > before) == grows
        choice._attend(_Captured(backend), SPEC, [(3, 1)])
        wrappers = (backend._decode, backend._prefill, backend._current)
        shared = (backend._workspace.data_ptr(), backend._int_workspace.data_ptr())
        assert {(each.workspace.data_ptr(), each.int_workspace.data_ptr()) for each in wrappers} == {shared}


@pytest.mark.parametrize(
    ("changes", "captured", "most"),
    [
        # Qwen3-VL-8B: 32 heads over 8; 132 multiprocessors in 33 tiles of 128 queries, in float32 with their sums
        ({"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}, 8, 128 << 20),
        # as many heads over one
        ({"num_heads": 32, "num_kv_heads": 1, "head_dim": 128}, 8, 32 * 264 * 128 * 129 * 4),
        # a tile of 16 for each of many captured requests, and what fills the tiles
        ({"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}, 1024, 32 * (1024 + 256) * 16 * 516),
    ],
)
def test_the_workspace_holds_what_a_plan_may_ask_for(changes, captured, most):
    found = workspace_bytes(spec(**changes), multiprocessors=132, captured=captured)
    assert found == max(most, 128 << 20)


@pytest.mark.parametrize(
    ("changes", "capability", "why"),
    [
        ({}, (8, 0), None),
        ({"cache_dtype": torch.float8_e4m3fn}, (9, 0), None),
        ({"dtype": torch.float32}, (9, 0), "not in float32"),
        ({"cache_dtype": torch.int8}, (9, 0), "no KV cache of int8"),
        ({"head_dim": 80}, (9, 0), "64, 128, 256 elements, and the model's 80"),
        ({}, (7, 5), "this GPU has 7.5"),
    ],
)
def test_what_it_lacks(changes, capability, why):
    said = lacks(spec(**changes), capability)
    assert said is None if why is None else why in (said or "")
