"""Attention by Triton's kernels behind the backend's interface, under its interpreter: torch's answers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from tests.vlmserve_common.kernels.paged_step import DEVICE, PagedStep, make_step
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine import build
from vlmserve.models.attention.base import AttentionBackend, AttentionSpec, RadixAttention
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve.models.attention.triton_backend import TritonAttentionBackend
from vlmserve_common.compute.rotary import rotation

HEADS, DIM = (4, 2), 16
LAYER = RadixAttention(HEADS[0], DIM, 0.3, HEADS[1], layer_id=0)
SPEC = AttentionSpec(
    num_heads=HEADS[0],
    num_kv_heads=HEADS[1],
    head_dim=DIM,
    scaling=0.3,
    dtype=torch.float32,
    cache_dtype=torch.float32,
    page_size=16,
    device=torch.device(DEVICE),
)


def attended(step: PagedStep, backend: AttentionBackend, *, graph: bool = False) -> torch.Tensor:
    """Of the step's queries, and keys and values that are written on the way."""
    batch = step.batch(backend)
    (backend.init_graph_metadata if graph else backend.init_forward_metadata)(batch)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(len(step.q), HEADS[0] + 2 * HEADS[1], DIM, generator=generator).to(DEVICE)
    cos, sin = rotation(torch.rand(len(qkv), DIM // 2, generator=generator) * 6, torch.float32)
    return LAYER(qkv, (cos.to(DEVICE), sin.to(DEVICE)), None, batch)


@pytest.mark.parametrize(
    "lengths", [[(0, 9), (37, 5)], [(50, 1), (8, 1), (0, 1)], [(20, 1), (0, 12), (33, 30), (3, 1)]], ids=str
)
def test_it_is_torch_s(lengths):
    backend = TritonAttentionBackend(SPEC)
    for seed in range(2):  # the second step finds what the first has left
        step = make_step(lengths, heads=HEADS, dim=DIM, seed=seed)
        wanted = attended(step, TorchAttentionBackend())
        torch.testing.assert_close(attended(step, backend), wanted, atol=1e-5, rtol=1e-5)


def test_one_workspace_for_all_steps_that_fit():
    backend = TritonAttentionBackend(SPEC)
    step = make_step([(20, 1), (3, 1)], heads=HEADS, dim=DIM)
    backend.init_graph_state(8, step.batch(backend).req_to_token_pool)
    assert backend.can_capture
    attended(step, backend, graph=True)
    first = backend._workspaces[-1]
    assert first.holds(batch=8, heads=4, kv_heads=2, dim=DIM, context=step.table.shape[1])
    eight = make_step([(20, 1)] * 8, heads=HEADS, dim=DIM)
    attended(eight, backend)
    assert backend._workspaces == [first]
    nine = make_step([(20, 1)] * 9, heads=HEADS, dim=DIM)
    wanted = attended(nine, TorchAttentionBackend())
    torch.testing.assert_close(attended(nine, backend), wanted, atol=1e-5, rtol=1e-5)
    assert backend._workspaces[0] is first, "captured graphs write there"


def test_what_is_reserved_is_enough_for_steps_and_graphs():
    backend = TritonAttentionBackend(SPEC)
    step = make_step([(20, 1)] * 3, heads=HEADS, dim=DIM)
    rows, context = step.table.shape
    backend.reserve(rows, context)
    [reserved] = backend._workspaces
    backend.init_graph_state(rows, step.batch(backend).req_to_token_pool)
    attended(step, backend, graph=True)
    attended(step, backend)
    assert backend._workspaces == [reserved]


def test_a_whole_engine_answers_alike(tmp_path, monkeypatch):
    """The kernels' in chunks, beside requests that decode."""
    folder = str(make_checkpoint("qwen3_vl", tmp_path))
    settings = {"num_threads": 1, "cpu_kernels": "off"}
    chunks = {"chunked_prefill_size": 48, "enable_mixed_chunk": True}
    greedy = SamplingOverrides(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    answers = []
    for make, more in ((lambda spec: TorchAttentionBackend(), {}), (TritonAttentionBackend, chunks)):
        with monkeypatch.context() as patch:
            patch.setattr(build, "choose_backend", lambda name, spec, make=make: make(spec))
            with LLM(folder, **settings, **more) as llm:
                reserved = getattr(llm._runner.attn_backend, "_workspaces", [])
                sizes = [len(one.logs) for one in reserved]
                answers.append(llm.chat_batch(conversations()[:2], greedy, num_logprobs=0))
                assert [len(one.logs) for one in reserved] == sizes, "nothing is allocated while it serves"
    assert len(sizes) == 1
    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids == theirs.token_ids
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert abs(mine.logprob - other.logprob) < 1e-4
