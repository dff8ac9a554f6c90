"""A small engine on `FakeCuda`: the real runner, queue, scheduler and encoder; its attention waits for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from tests.fake_cuda.tensors import CUDA, CudaTensor, FakeCuda, FakeMark
from vision.towers.runner import TowerRunner
from vlmserve import LLM
from vlmserve.engine.recurrent import state_shape
from vlmserve.engine.step import OneGroup
from vlmserve.executor.device_queue import StreamQueue
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, Projected, RadixAttention, position_and_store
from vlmserve_common.compute.transfers import PackedTransfers


class GatheringBackend(AttentionBackend):
    """Every token attends over its request's slots, all of which are gathered: what a kernel does in one launch."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        batch = forward_batch
        longest = max(a + b for a, b in zip(batch.prefix_lens, batch.extend_lens, strict=True))
        tokens = torch.arange(len(batch.input_ids), device=batch.input_ids.device, dtype=torch.int32)
        owners = torch.searchsorted(batch.extend_start_loc[1:], tokens, right=True)
        places = batch.seq_lens[owners] - batch.extend_start_loc[owners + 1] + tokens
        self._slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, :longest][owners].long()
        self._hidden = torch.arange(longest, device=tokens.device)[None] > places[:, None]

    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        q = position_and_store(own, layer, forward_batch)
        cache = forward_batch.kv_cache.layers[layer.layer_id]
        q = q.unflatten(1, (layer.num_kv_heads, -1)).float() * layer.scaling
        keys, values = (part[self._slots].float() for part in (cache.keys, cache.values))  # [N, L, Hkv, D]
        scores = torch.einsum("nhgd,nlhd->nhgl", q, keys).masked_fill(self._hidden[:, None, None], -torch.inf)
        return torch.einsum("nhgl,nlhd->nhgd", scores.softmax(-1), values).flatten(1).to(own.qkv.dtype)


class FakeLane:
    """See `vlmserve_common.compute.lanes.Lane`. handed_over: how many tensors were."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.handed_over = 0

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> FakeMark:
        return self._cuda.mark()

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        self.handed_over += len(tuple(tensors))


def move(module: nn.Module) -> None:
    """Parameters and buffers to the GPU that is not there."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = CudaTensor(tensor.detach())


def move_engine(llm: LLM, cuda: FakeCuda) -> ModelRunner:
    """From here on an engine that was loaded on the CPU, without its own operators, computes on that GPU."""
    runner, config = llm._runner, llm._runner.model.config
    move(runner.model)
    pool, shape = runner.req_to_token_pool, state_shape(config, runner.model.dtype)
    moved = ModelRunner(
        model=runner.model,
        kv_cache=KVCache(
            num_slots=len(runner.kv_cache.layers[0].keys),
            num_layers=config.num_kv_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=runner.kv_cache.dtype,
            device=CUDA,
            further=runner.model.further_kv,
        ),
        req_to_token_pool=ReqToTokenPool(pool.size, pool.max_context_len, CUDA),
        attn_backend=GatheringBackend(),
        device=CUDA,
        recurrent_cache=None if shape is None else RecurrentCache(runner.recurrent_cache.num_states, shape, CUDA),
        logits_processors=runner._logits_processors,
        transfers=PackedTransfers(CUDA, cuda.mark),
    )
    loop = llm.engine.loop
    loop.worker, loop.device = OneGroup(moved), StreamQueue()
    encoder = loop.encoder
    encoder.cache.device.device = CUDA
    encoder._backend._runner = TowerRunner(runner.model.visual, CUDA)
    encoder._backend._lane = FakeLane(cuda)
    return moved
