"""The simplest attention there is, to test decoders without pools: every request's keys and values in a list."""

from __future__ import annotations

from pathlib import Path

import torch

from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep, Span
from vlmserve.models.attention.base import (
    AttentionBackend,
    ForwardBatch,
    ForwardMode,
    Projected,
    RadixAttention,
    positioned,
)
from vlmserve.models.vlm import VisionLanguageModel

IDS = torch.arange(40, 71)
POSITIONS = torch.arange(len(IDS)).expand(3, -1)
"""A prompt of text."""


class DenseAttention(AttentionBackend):
    """Keeps K and V by (layer, req_pool_idx) and attends with explicit causal masks, in float32."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        q, k, v = positioned(own, layer.num_kv_heads)
        outs = []
        lens = forward_batch.extend_lens
        parts = zip(forward_batch.req_pool_indices.tolist(), q.split(lens), k.split(lens), v.split(lens), strict=True)
        for req, req_q, req_k, req_v in parts:
            key = (layer.layer_id, req)
            if key in self.kv:
                req_k, req_v = torch.cat((self.kv[key][0], req_k)), torch.cat((self.kv[key][1], req_v))
            self.kv[key] = (req_k.clone(), req_v.clone())
            groups = layer.num_heads // layer.num_kv_heads
            keys = req_k.float().repeat_interleave(groups, 1)
            values = req_v.float().repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", req_q.float(), keys) * layer.scaling
            past = len(keys) - len(req_q)
            future = torch.ones(len(req_q), len(keys), dtype=torch.bool).triu(past + 1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype).flatten(1))
        return torch.cat(outs)


def make_batch(
    backend: AttentionBackend,
    input_ids: list[torch.Tensor],
    positions: list[torch.Tensor],
    prefix_lens: list[int],
    states: RecurrentCache | None = None,
) -> ForwardBatch:
    """A batch of requests 0..B-1: their new ids [L_i], positions [3, L_i], and how many tokens came before. states: of
    requests, from number 1 on."""
    extend_lens = [len(ids) for ids in input_ids]
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.cat(input_ids),
        positions=torch.cat(positions, dim=1),
        req_pool_indices=torch.arange(len(input_ids)),
        seq_lens=torch.tensor(prefix_lens, dtype=torch.int32) + torch.tensor(extend_lens, dtype=torch.int32),
        extend_start_loc=torch.tensor([0, *extend_lens]).cumsum(0, dtype=torch.int32),
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        out_cache_loc=torch.arange(sum(extend_lens)),
        req_to_token_pool=None,  # type: ignore[arg-type]
        kv_cache=None,  # type: ignore[arg-type]
        attn_backend=backend,
        recurrent=recurrent_step(states, prefix_lens, extend_lens) if states is not None else None,
    )


def recurrent_step(states: RecurrentCache, prefix_lens: list[int], extend_lens: list[int]) -> RecurrentStep:
    """Requests 0..B-1 in states 1..B."""
    starts = torch.tensor([0, *extend_lens]).cumsum(0).tolist()
    single = [request for request, length in enumerate(extend_lens) if length == 1]
    return RecurrentStep(
        cache=states,
        spans=tuple(
            Span(start=starts[request], length=length, prefix_len=prefix_lens[request], state=request + 1)
            for request, length in enumerate(extend_lens)
            if length > 1
        ),
        single_states=torch.tensor(single) + 1 if single else None,
        single_tokens=torch.tensor([starts[request] for request in single]) if single else None,
    )


@torch.inference_mode()
def reference_logits(folder: Path) -> torch.Tensor:
    """What transformers computes in float32 for IDS: [length, vocab]."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=IDS[None], attention_mask=torch.ones_like(IDS[None])).logits[0]


@torch.inference_mode()
def logits_of(model: VisionLanguageModel) -> torch.Tensor:
    """What a model computes for IDS: [length, vocab]."""
    model.pack()
    shape = state_shape(model.config, model.dtype)
    states = None if shape is None else RecurrentCache(1, shape, torch.device("cpu"))
    batch = make_batch(DenseAttention(), [IDS], [POSITIONS], [0], states)
    return model.compute_logits(model(model.embed_tokens(IDS), batch.positions, batch))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def distance_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Kullback-Leibler divergence from theirs, in nats, averaged."""
    theirs, ours = theirs.log_softmax(-1), ours.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
