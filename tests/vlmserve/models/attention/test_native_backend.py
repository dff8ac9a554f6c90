"""Attention by our own operators in a whole engine: torch's answers, and the same ones whatever the chunks."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vlmserve.reference import conversations
from vlmserve import LLM, SamplingOverrides
from vlmserve.models.attention.native_backend import NativeAttentionBackend
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve_common.kernels.build import CannotBuild, best_level, cpu_words

try:
    best_level(cpu_words())
except CannotBuild as error:
    pytest.skip(str(error), allow_module_level=True)

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A float32 checkpoint."""
    return str(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


def answers(folder: str, backend: str, **settings) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of all conversations, and their log-probabilities."""
    with LLM(folder, num_threads=2, attention_backend=backend, **settings) as llm:
        expected = NativeAttentionBackend if backend == "native" else TorchAttentionBackend
        assert isinstance(llm._runner.attn_backend, expected)
        done = llm.chat_batch(conversations(), GREEDY, num_logprobs=0)
    tokens = [list(completion.token_ids) for completion in done]
    return tokens, torch.tensor([[token.logprob for token in completion.logprobs] for completion in done])


def same_but_for_near_ties(tokens, ours, wanted, logprobs, atol):
    """Up to the first other token of each answer: a last bit of a key may be a whole step of 8 bits.

    There both have chosen their most probable token, and these are as close as all others.
    """
    agreed = 0
    for row, pair in enumerate(zip(tokens, wanted, strict=True)):
        same = [a == b for a, b in zip(*pair, strict=True)]
        length = same.index(False) if False in same else len(same)
        agreed += length
        torch.testing.assert_close(ours[row, : length + 1], logprobs[row, : length + 1], atol=atol, rtol=0)
    assert agreed > 0.8 * logprobs.numel()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e4m3"])
def test_answers_are_torch_s_and_do_not_depend_on_chunks(folder, kv_cache_dtype):
    wanted, logprobs = answers(folder, "torch", kv_cache_dtype=kv_cache_dtype)
    first = None
    for settings in (
        {},
        {"chunked_prefill_size": 16, "enable_mixed_chunk": True, "page_size": 1},
        {"chunked_prefill_size": -1, "max_running_requests": 1, "disable_radix_cache": True},
    ):
        tokens, ours = answers(folder, "native", kv_cache_dtype=kv_cache_dtype, **settings)
        if first is None:
            first = ours
            if kv_cache_dtype == "auto":
                assert tokens == wanted
                torch.testing.assert_close(ours, logprobs, atol=1e-4, rtol=0)
            else:
                same_but_for_near_ties(tokens, ours, wanted, logprobs, atol=2e-2)
        assert torch.equal(ours, first)


def test_eight_bits_are_close_and_not_the_same(folder):
    _, logprobs = answers(folder, "native")
    for dtype, near in (("int8", 0.1), ("fp8_e4m3", 0.8)):
        _, ours = answers(folder, "native", kv_cache_dtype=dtype)
        apart = (ours[:, 0] - logprobs[:, 0]).abs().max()
        assert 0 < apart < near
