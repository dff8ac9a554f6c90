"""Sparse attention's choice of tokens, against the rule written out, over the steps of an engine."""

import dataclasses
import itertools

import pytest
import torch

from tests.tiny_checkpoints import STREAMED, make_checkpoint, without_ties
from vlmserve.memory.kv_cache import KVCache, KVShape
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import ForwardBatch, ForwardMode
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve.models.qwen3_5 import make_rotary
from vlmserve.models.qwen4_exp.sparse import BlockPlan, Indexer
from vlmserve.models.registry import load_model
from vlmserve_common.compute.rotary import rotate

TOKENS = 90


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_checkpoint(STREAMED, tmp_path_factory.mktemp(STREAMED)))


def by_hand(indexer, rotary, x, positions, index) -> list[set[int]]:
    """The tokens that each token attends to."""
    cos, sin = rotary(positions)
    turning = cos.shape[-1]

    def turned(heads, at):
        first = rotate(heads[..., :turning], cos[at], sin[at])
        return torch.cat((first, heads[..., turning:]), dim=-1)

    projected = indexer.index_qk_proj(x).unflatten(-1, (index.heads + 1, index.head_dim))
    found = []
    for p in range(len(x)):
        complete = (p + 1) // index.block
        query = turned(indexer.q_layernorm(projected[p : p + 1, :-1].contiguous()), slice(p, p + 1))[0]
        scores = []
        for block in range(complete):
            start = block * index.block
            key = indexer.k_layernorm(projected[start : start + index.block, -1].mean(0, keepdim=True)[:, None])
            scores.append((query @ turned(key, slice(start, start + 1))[0, 0]).relu().sum().item())
        best = sorted(range(complete), key=lambda b: -scores[b])[: index.budget // index.block]
        tokens = {b * index.block + i for b in best for i in range(index.block)}
        found.append(tokens | set(range(complete * index.block, p + 1)))
    return found


def step(model, pool, cache, requests, positions) -> ForwardBatch:
    """A step of requests (row, first token, last token + 1), whose tokens lie in slots of row * TOKENS on."""
    lengths = [end - start for _, start, end in requests]
    slots = torch.cat([torch.arange(row * TOKENS + start, row * TOKENS + end) for row, start, end in requests])
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        positions=torch.cat([positions[:, start:end] for _, start, end in requests], dim=1),
        req_pool_indices=torch.tensor([row for row, _, _ in requests]),
        seq_lens=torch.tensor([end for _, _, end in requests], dtype=torch.int32),
        extend_start_loc=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        prefix_lens=[start for _, start, _ in requests],
        extend_lens=lengths,
        out_cache_loc=slots,
        req_to_token_pool=pool,
        kv_cache=cache,
        attn_backend=TorchAttentionBackend(),
    )


@torch.inference_mode()
@pytest.mark.parametrize("cuts", [(), (33, 34, 35, 36, 70), (3, 50, 51), tuple(range(1, TOKENS))])
def test_each_token_chooses_by_the_rule(model, cuts):
    config = model.config
    indexer = Indexer(config, 0)
    generator = torch.Generator().manual_seed(4)
    for parameter in indexer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    indexer.index_qk_proj.weight.copy_(without_ties(indexer.index_qk_proj.weight))
    rotary = make_rotary(config, torch.float32)
    x = torch.randn(2, TOKENS, config.hidden_size, generator=generator)
    positions = (torch.arange(TOKENS) // 3).expand(3, -1) * torch.tensor([1, 2, 3])[:, None]
    index = config.index
    pool = ReqToTokenPool(2, TOKENS, "cpu")
    for row in range(2):
        pool.write(row, 0, torch.arange(row * TOKENS, (row + 1) * TOKENS))
    cache = KVCache(
        num_slots=2 * TOKENS,
        num_layers=0,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        further=(KVShape(1, index.head_dim),),
    )
    wanted = [by_hand(indexer, rotary, one, positions, index) for one in x]
    for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        # the other request is two tokens behind
        both = [(0, start, end), (1, max(0, start - 2), end - 2)]
        requests = [one for one in both if one[1] < one[2]]
        batch = step(model, pool, cache, requests, positions)
        batch = dataclasses.replace(batch, blocks=BlockPlan.of(batch, index))
        rows = torch.cat([x[row, first:last] for row, first, last in requests])
        chosen = indexer(rows, rotary(batch.positions), batch)
        own = [(row, p) for row, first, last in requests for p in range(first, last)]
        if chosen is None:
            assert all(p < index.most for _, p in own)
            continue
        slots, counts = chosen
        for (row, p), some, count in zip(own, slots.tolist(), counts.tolist(), strict=True):
            assert len(set(some[:count])) == count <= index.most
            assert {slot - row * TOKENS for slot in some[:count]} == wanted[row][p], (row, p)
