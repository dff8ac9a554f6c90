"""The gated delta rule by chunks, by single tokens, and as transformers has it."""

import pytest
import torch
from torch.nn import functional as F

from tests import hf_env  # noqa: F401
from vlmserve_common.compute.delta_rule import CHUNK, causal_conv, chunk_rule, recurrent_step, unit_heads

HEADS, KEY, VALUE = 4, 16, 8


def inputs(tokens: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, g, beta of so many tokens, and the state before."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (unit_heads(normal(tokens, HEADS // 2, KEY), HEADS) for _ in range(2))
    g, beta = -F.softplus(normal(tokens, HEADS)), normal(tokens, HEADS).sigmoid()
    return [q, k, normal(tokens, HEADS, VALUE), g, beta], normal(HEADS, KEY, VALUE)


def one_by_one(parts: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state = state[None].clone()
    outs = [recurrent_step(*(part[i : i + 1] for part in parts), state) for i in range(len(parts[0]))]
    return torch.cat(outs), state[0]


@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_come_to_what_single_tokens_do(tokens):
    parts, state = inputs(tokens)
    for got, want in zip(chunk_rule(*parts, state), one_by_one(parts, state), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [5, 2 * CHUNK + 9])
def test_both_equal_transformers(tokens):
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(tokens, HEADS // 2, KEY, generator=generator) for _ in range(2))
    (_, _, v, g, beta), state = inputs(tokens)
    parts = [unit_heads(q, HEADS), unit_heads(k, HEADS), v, g, beta]
    for ours, theirs in ((chunk_rule, torch_chunk_gated_delta_rule), (one_by_one, torch_recurrent_gated_delta_rule)):
        got = ours(parts, state) if ours is one_by_one else chunk_rule(*parts, state)
        want = theirs(
            *(part[None] for part in (q, k, v)),
            g=g[None],
            beta=beta[None],
            initial_state=state[None].clone(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(got[0], want[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[1], want[1][0], rtol=1e-4, atol=1e-5)


def test_convolution():
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(9, 6, generator=generator), torch.randn(6, 4, generator=generator)
    before = torch.randn(3, 6, generator=generator)
    every = torch.cat((before, x)).t()[None]
    want = F.silu(F.conv1d(every, weight[:, None], groups=6))[0].t()
    whole = causal_conv(before, x, weight)
    torch.testing.assert_close(whole, want)
    cut = causal_conv(before, x[:5], weight), causal_conv(x[2:5], x[5:], weight)
    torch.testing.assert_close(torch.cat(cut), whole)
    batch = causal_conv(torch.stack((before, x[:3])), torch.stack((x[:1], x[3:4])), weight)
    torch.testing.assert_close(batch[:, 0], whole[[0, 3]])
