"""The simplest attention there is, to test decoders without pools: every request's keys and values in a list."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.vlmserve.models.steps import forward_batch
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep, Span
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, RadixAttention, positioned
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.kernels.attention import HeadNorms

IDS = torch.arange(40, 71)
POSITIONS = torch.arange(len(IDS)).expand(3, -1)
"""A prompt of text."""


class DenseAttention(AttentionBackend):
    """Keeps K and V by (layer, req_pool_idx) and attends with explicit causal masks, in float32."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: Rotation,
        norms: HeadNorms | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        q, k, v = positioned(qkv, rotary, norms, layer.num_kv_heads)
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
    return forward_batch(
        backend,
        prefix_lens,
        extend_lens,
        input_ids=torch.cat(input_ids),
        positions=torch.cat(positions, dim=1),
        recurrent=recurrent_step(states, prefix_lens, extend_lens) if states is not None else None,
    )


@torch.inference_mode()
def logits_of(model: VisionLanguageModel) -> torch.Tensor:
    """What a model computes for IDS: [length, vocab]."""
    model.pack()
    batch = make_batch(DenseAttention(), [IDS], [POSITIONS], [0])
    return model.compute_logits(model(model.embed_tokens(IDS), batch.positions, batch))


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


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that logits are those of the same weights."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def round_no_inputs(patch: pytest.MonkeyPatch) -> None:
    """Have products of 8-bit floats take their inputs as they are."""
    patch.setattr(
        "vlmserve_common.compute.fp8.quantize", lambda x, group, scale: (x, torch.ones(len(x), -(-x.shape[1] // group)))
    )
