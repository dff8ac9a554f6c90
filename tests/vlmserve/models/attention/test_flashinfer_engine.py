"""A whole engine whose attention is told what FlashInfer would be: pages that requests share, that are taken back, and
that chunks end within."""

from __future__ import annotations

import sys

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.models.attention import fake_flashinfer
from tests.vlmserve.reference import conversations
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine import build
from vlmserve.models.attention.flashinfer_backend import FlashInferAttentionBackend

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=8, ignore_eos=True)


def _answers(folder: str, **settings) -> list[list[int]]:
    with LLM(folder, num_threads=1, cpu_kernels="off", **settings) as llm:
        once = llm.chat_batch(conversations(), GREEDY)
        again = llm.chat_batch(conversations(), GREEDY)  # with what is cached of the first
    return [list(completion.token_ids) for completion in (*once, *again)]


def test_the_answers_are_torch_s(tmp_path, monkeypatch):
    folder = str(make_checkpoint("qwen3_vl", tmp_path))
    wanted = _answers(folder)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(fake_flashinfer, "_HEAD_DIMS", range(8, 256))
    plans: list[str] = []
    monkeypatch.setattr(fake_flashinfer, "plans", plans)
    monkeypatch.setattr(build, "choose_backend", lambda setting, spec: FlashInferAttentionBackend(spec))
    for settings in (
        {},
        {"page_size": 7, "chunked_prefill_size": 21, "enable_mixed_chunk": True, "max_total_tokens": 420},
    ):
        plans.clear()
        assert _answers(folder, **settings) == wanted
        assert set(plans) == {"BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"}
