"""The tensors that captured decode steps read, and the one that they write."""

from __future__ import annotations

import dataclasses

import torch

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode

# Rows of the int64 tensor. Positions are next to each other, so that they are one contiguous [3, size].
_INPUT_IDS, _POSITIONS, _REQ_POOL_INDICES, _OUT_CACHE_LOC, _STATES = 0, slice(1, 4), 4, 5, 6
# Of the dummy page that the allocator never hands out.
_PADDING_SLOT = 0


class DecodeBuffers:
    """Owner of static memory for steps of up to `max_batch_size` requests with one token each.

    Steps of all sizes lie in the same memory, one at a time. What a step has too few requests for is padded by requests
    of one token: they are in the pool's padding row, in the dummy page's first slot, and in the padding state where a
    model has recurrent layers.

    hidden: [max_batch_size, hidden], what a step gives.
    """

    def __init__(
        self,
        max_batch_size: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        req_to_token_pool: ReqToTokenPool,
        kv_cache: KVCache,
        attn_backend: AttentionBackend,
        recurrent_cache: RecurrentCache | None = None,
    ) -> None:
        self._num_rows = _STATES if recurrent_cache is None else _STATES + 1
        self.hidden = torch.zeros(max_batch_size, hidden_size, dtype=dtype, device=device)
        self._rows = torch.zeros(self._num_rows * max_batch_size, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(max_batch_size, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._padding = torch.zeros(self._num_rows, max_batch_size, dtype=torch.int64, device=device)
        self._padding[_REQ_POOL_INDICES] = req_to_token_pool.padding_row
        self._padding[_OUT_CACHE_LOC] = _PADDING_SLOT
        if recurrent_cache is not None:
            assert recurrent_cache.padding_state is not None
            self._padding[_STATES] = recurrent_cache.padding_state
        self._padding_lens = torch.ones(max_batch_size, dtype=torch.int32, device=device)
        self._req_to_token_pool = req_to_token_pool
        self._kv_cache = kv_cache
        self._attn_backend = attn_backend
        self._recurrent_cache = recurrent_cache

    def padded(self, size: int) -> ForwardBatch:
        """A step of `size` requests that are all padding; its tensors are those of every step of that size."""
        rows = self._of_size(size)
        torch._foreach_copy_(
            [*rows.unbind(), self._seq_lens[:size]], [*self._pad_rows(size), self._padding_lens[:size]]
        )
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=rows[_INPUT_IDS],
            positions=rows[_POSITIONS],
            req_pool_indices=rows[_REQ_POOL_INDICES],
            seq_lens=self._seq_lens[:size],
            extend_start_loc=self._starts[: size + 1],
            prefix_lens=[0] * size,
            extend_lens=[1] * size,
            out_cache_loc=rows[_OUT_CACHE_LOC],
            req_to_token_pool=self._req_to_token_pool,
            kv_cache=self._kv_cache,
            attn_backend=self._attn_backend,
            recurrent=None
            if self._recurrent_cache is None
            else RecurrentStep(cache=self._recurrent_cache, spans=(), single_states=rows[_STATES]),
        )

    def load(self, static: ForwardBatch, step: ForwardBatch) -> ForwardBatch:
        """Copy a step of no more requests into the tensors of `static`, which `padded` made: two launches on a GPU,
        whatever the sizes. Returns it with the step's host lists."""
        size, count = len(static.extend_lens), len(step.extend_lens)
        rows = self._of_size(size)
        given = [step.input_ids, *step.positions.unbind(), step.req_pool_indices, step.out_cache_loc]
        if step.recurrent is not None:
            assert step.recurrent.single_states is not None
            given.append(step.recurrent.single_states)
        targets, lens = [*rows[:, :count].unbind()], [self._seq_lens[:count]]
        given_lens = [step.seq_lens]
        if count < size:
            targets += rows[:, count:].unbind()
            given += self._pad_rows(size - count)
            lens.append(self._seq_lens[count:size])
            given_lens.append(self._padding_lens[: size - count])
        # one launch for each dtype
        torch._foreach_copy_(targets, given)
        torch._foreach_copy_(lens, given_lens)
        more = size - count
        return dataclasses.replace(
            static, prefix_lens=step.prefix_lens + [0] * more, extend_lens=step.extend_lens + [1] * more
        )

    def _of_size(self, size: int) -> torch.Tensor:
        return self._rows[: self._num_rows * size].view(self._num_rows, size)

    def _pad_rows(self, count: int) -> list[torch.Tensor]:
        return [*self._padding[:, :count].unbind()]
