"""Decoder layers by the fused operators: what torch computes, in a fifth of the launches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from tests.vlmserve.models.batches import forward_batch, make_config
from vlmserve.executor.sampler import choose
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardMode, position_and_store
from vlmserve.models.qwen import Qwen2Decoder, Qwen3Decoder
from vlmserve_common.kernels import fused

pytest.importorskip("triton")
from tests.vlmserve.models.launch_counter import launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES = (Qwen2Decoder, Qwen3Decoder)
HIDDEN = 64
# Of one layer in a decode step in bfloat16, but for attention itself. Fused: two norms, four products, gates, and all
# between the first product and attention.
FUSED_LAUNCHES = 8
TORCH_LAUNCHES = {Qwen2Decoder: 30, Qwen3Decoder: 39}
LAUNCHES_BESIDE = 12
SAMPLING_LAUNCHES = 2


class CachedAttention(AttentionBackend):
    """Reads what is in the cache, request by request."""

    def init_forward_metadata(self, forward_batch):
        """Nothing to prepare."""

    def forward(self, own, layer, forward_batch):
        q = position_and_store(own, layer, forward_batch)
        outs = []
        requests = zip(q.split(forward_batch.extend_lens), forward_batch.seq_lens.tolist(), strict=True)
        for row, (queries, total) in enumerate(requests):
            slots = forward_batch.req_to_token_pool.req_to_token[row, :total].long()
            k, v = forward_batch.kv_cache.read(layer.layer_id, slots, q.dtype)
            seen = torch.ones(len(queries), total, dtype=torch.bool, device=q.device).tril(total - len(queries))
            parts = (part.transpose(0, 1)[None].float() for part in (queries, k, v))
            out = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=layer.scaling, enable_gqa=True)
            outs.append(out[0].transpose(0, 1).flatten(1).to(q.dtype))
        return torch.cat(outs)


class NoAttention(AttentionBackend):
    """Launches nothing of its own."""

    def init_forward_metadata(self, forward_batch):
        """Nothing to prepare."""

    def forward(self, own, layer, forward_batch):
        return position_and_store(own, layer, forward_batch).flatten(1)


def make_decoder(family, *, layers, dtype):
    config = make_config(num_layers=layers, hidden_size=HIDDEN, head_dim=16, mrope_section=(4, 2, 2), dtype=dtype)
    decoder = family(config, dtype).to(DEVICE, dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return decoder.requires_grad_(False)


def make_batch(backend, cache, pool, *lengths):
    tokens = sum(new for _, new in lengths)
    positions = torch.arange(3 * tokens, device=DEVICE).view(3, tokens)
    return forward_batch(
        backend, pool, cache, range(len(lengths)), lengths, positions=positions, forward_mode=ForwardMode.MIXED
    )


def make_pools(layers, dtype):
    cache = KVCache(num_slots=60, num_layers=layers, num_kv_heads=2, head_dim=16, dtype=dtype, device=DEVICE)
    pool = ReqToTokenPool(2, 20, DEVICE)
    for row in range(2):
        pool.write(row, 0, torch.arange(20, device=DEVICE).flip(0) * 2 + row)
    return cache, pool


def answers(decoder, dtype):
    """Two steps: prompts, whose pictures have DeepStack rows, and a token each."""
    backend = CachedAttention()
    cache, pool = make_pools(2, dtype)
    generator = torch.Generator().manual_seed(2)
    made = []
    for lengths, rows in (([(0, 2), (0, 5)], 3), ([(2, 1), (5, 1)], 0)):
        batch = make_batch(backend, cache, pool, *lengths)
        embeds = torch.randn(len(batch.input_ids), HIDDEN, generator=generator).to(DEVICE, dtype)
        index = torch.arange(1, 1 + rows, device=DEVICE) if rows else None
        deepstack = torch.randn(1, rows, HIDDEN, generator=generator).to(DEVICE, dtype) if rows else None
        with torch.inference_mode():
            made.append(decoder(embeds, batch.positions, batch, index, deepstack))
    return torch.cat(made).float()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(Qwen2Decoder, torch.float32), (Qwen3Decoder, torch.float32), (Qwen3Decoder, torch.bfloat16)],
)
def test_the_same_hidden_states(family, dtype):
    decoder = make_decoder(family, layers=2, dtype=dtype)
    wanted = answers(decoder, dtype)
    fused.activate("triton", DEVICE)
    found = answers(decoder, dtype)
    assert torch.allclose(found, wanted, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert (found - wanted).abs().mean() < (1e-6 if dtype == torch.float32 else 2e-3)


def launched_by_a_layer(family):
    """The names of what a decode step of three layers has more than one of two, and of how many others there are."""
    found = []
    for layers in (2, 3):
        decoder = make_decoder(family, layers=layers, dtype=torch.bfloat16)
        cache, pool = make_pools(layers, torch.bfloat16)
        batch = make_batch(NoAttention(), cache, pool, (5, 1), (9, 1))
        embeds = torch.randn(2, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        with torch.inference_mode(), launches() as names:
            decoder(embeds, batch.positions, batch)
        found.append(names)
    count = len(found[1]) - len(found[0])
    return found[1][-count - 1 : -1], len(found[0]) - 2 * count


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_of_a_layer(family):
    names, _ = launched_by_a_layer(family)
    assert len(names) == TORCH_LAUNCHES[family], names
    fused.activate("triton", DEVICE)
    names, beside = launched_by_a_layer(family)
    assert len(names) == FUSED_LAUNCHES, names
    assert beside == LAUNCHES_BESIDE


def test_launches_of_a_random_choice():
    fused.activate("triton", DEVICE)
    numbers, scores = torch.arange(3, device=DEVICE), torch.zeros(3, 40, device=DEVICE)
    with torch.inference_mode(), launches() as names:
        choose(scores, None, numbers, numbers)
    assert len(names) == SAMPLING_LAUNCHES, names


def test_an_operator_that_copies_is_a_launch_and_one_that_does_not_is_none():
    x = torch.ones(4, 6)
    with launches() as launched:
        x.float().view(6, 4).t().reshape(-1)  # the last of these copies
        x.bfloat16().contiguous()
        x[1:].add_(1)
        torch.empty(3)
    counted = Counter(launched)
    assert counted == {"reshape": 1, "to": 1, "add_": 1} or counted == {"clone": 1, "_to_copy": 1, "add_": 1}
