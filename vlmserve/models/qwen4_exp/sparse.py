"""Sparse attention: an index scores blocks of tokens, and a token attends to the best ones.

The index has a layer of the KV cache for each layer of attention. There a slot's `keys` are the token's raw index key.
Its `values` are the token's rotation, which the key of a block takes from its first token. In the slot of a block's
last token they are the block's key instead. So all that a slot has depends on the tokens up to its own, and slots are
shared, moved and computed anew as those of keys and values are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vlmserve.models.attention.base import ForwardBatch, Projected
from vlmserve.models.config import ModelConfig
from vlmserve.models.qwen3_5 import GatedAttention
from vlmserve.models.qwen4_exp.config import IndexConfig
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.layers import ZeroCentredRMSNorm
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.rotary import Rotation, rotate
from vlmserve_common.compute.transfers import to_device

_SCORES = 1 << 24
"""The most products of queries and keys of blocks that exist at a time."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Tokens that choose blocks together. tokens int64 [G * T]: of the batch, T of each of G requests. rows int64 [G],
    places int64 [G, T], blocks: of these requests in the table, of the tokens in them, and the most complete blocks."""

    tokens: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    blocks: int


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """What a step means for blocks. ends: slots int64 [M, block] of blocks that it completes. asking: None if no token
    has more before it than it may attend to, so attention is causal attention."""

    ends: torch.Tensor
    asking: tuple[Asking, ...] | None

    @staticmethod
    def of(step: ForwardBatch, index: IndexConfig, *, asks: bool = True) -> BlockPlan:
        """Make the plan of a step. asks: whether its tokens attend to others. A place below 0 is in no block: an MTP
        head has no entry for the first token of a prompt."""
        lengths, before = np.array(step.extend_lens), np.array(step.prefix_lens)
        starts = lengths.cumsum() - lengths
        places = np.arange(lengths.sum()) + np.repeat(before - starts, lengths)
        device, table = step.input_ids.device, step.req_to_token_pool.req_to_token
        owners = np.repeat(np.arange(len(lengths)), lengths)
        last = np.flatnonzero((places >= 0) & ((places + 1) % index.block == 0))
        of_blocks = _on(places[last, None] - np.arange(index.block)[::-1], device)
        ends = table[step.req_pool_indices[_on(owners[last], device)][:, None], of_blocks].long()
        if not asks or (before + lengths).max(initial=0) <= index.most:
            return BlockPlan(ends=ends, asking=None)
        asking = []
        single = np.flatnonzero(lengths == 1)
        groups = [single] if len(single) else []
        for own in (*groups, *(np.array([one]) for one in np.flatnonzero(lengths > 1))):
            tokens = starts[own, None] + np.arange(lengths[own[0]])
            asking.append(
                Asking(
                    tokens=_on(tokens.flatten(), device),
                    rows=step.req_pool_indices[_on(own, device)],
                    places=_on(places[tokens], device),
                    blocks=int((before + lengths)[own].max()) // index.block,
                )
            )
        return BlockPlan(ends=ends, asking=tuple(asking))


def _on(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)


class Indexer(nn.Module):
    """Scores blocks for each token (`Qwen4ExpTextQSAIndexer` in transformers). layer_id: of the KV cache. Processes
    that share the model have all of it, so they choose alike."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        assert config.index is not None
        self._index, self._layer_id = config.index, layer_id
        heads, dim = config.index.heads, config.index.head_dim
        self.index_qk_proj = Linear(config.hidden_size, (heads + 1) * dim, bias=False)
        self.index_qk_proj.may_be_quantised = False
        self.q_layernorm = ZeroCentredRMSNorm(dim, config.rms_norm_eps)
        self.k_layernorm = ZeroCentredRMSNorm(dim, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, rotary: Rotation, step: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keep the index keys of x [N, hidden]. Return the arguments `slots` and `counts` of `attend_chosen`; None if
        attention is causal attention."""
        assert step.blocks is not None, "a step without blocks"
        queries = self.store(x, rotary, step)
        if step.blocks.asking is None:
            return None
        queries = self.q_layernorm(queries.contiguous())
        turning = rotary[0].shape[-1]
        queries[..., :turning] = rotate(queries[..., :turning], *rotary)
        longest = max(one.blocks for one in step.blocks.asking)
        most = min(longest * self._index.block, self._index.budget) + self._index.block - 1
        slots = torch.zeros((len(x), most), dtype=torch.int32, device=x.device)
        counts = torch.empty(len(x), dtype=torch.int64, device=x.device)
        for asking in step.blocks.asking:
            for part in self._parts(asking):
                chosen, counts[part.tokens] = self._choose(queries[part.tokens], part, step)
                slots[part.tokens, : chosen.shape[1]] = chosen
        return slots, counts

    def store(self, x: torch.Tensor, rotary: Rotation, step: ForwardBatch) -> torch.Tensor:
        """Keep the index keys of x [N, hidden]. Return its queries [N, heads, dim]."""
        heads, dim = self._index.heads, self._index.head_dim
        queries, keys = self.index_qk_proj(x).unflatten(-1, (heads + 1, dim)).split([heads, 1], dim=1)
        cos, sin = rotary
        half = cos.shape[-1] // 2
        turns = keys.new_zeros(keys.shape)
        turns[..., :half], turns[..., half : 2 * half] = cos[..., :half], sin[..., half:]
        step.kv_cache.write(self._layer_id, step.out_cache_loc, keys, turns)
        assert step.blocks is not None
        ends = step.blocks.ends
        if not len(ends):
            return queries
        layer = step.kv_cache.layers[self._layer_id]
        pooled = self.k_layernorm(layer.keys[ends].float().mean(dim=1).to(keys.dtype))
        cos, sin = layer.values[ends[:, 0]][..., : 2 * half].chunk(2, dim=-1)
        turned = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        pooled[..., : 2 * half] = rotate(pooled[..., : 2 * half], *turned)
        layer.values[ends[:, -1]] = pooled
        return queries

    def _parts(self, asking: Asking) -> Iterator[Asking]:
        """Cut what asks together, so that its scores take little memory."""
        each = max(1, _SCORES // (self._index.heads * max(1, asking.blocks)))
        requests, length = asking.places.shape
        if requests == 1:
            for first in range(0, length, each):
                own = slice(first, first + each)
                yield Asking(
                    tokens=asking.tokens[own],
                    rows=asking.rows,
                    places=asking.places[:, own],
                    blocks=asking.blocks,
                )
            return
        for first in range(0, requests, each):
            own = slice(first, first + each)
            yield Asking(
                tokens=asking.tokens[own], rows=asking.rows[own], places=asking.places[own], blocks=asking.blocks
            )

    def _choose(self, queries: torch.Tensor, asking: Asking, step: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots int32 [G * T, most] and their numbers int64 [G * T] of tokens with these queries [G * T,
        heads, dim]. The slots of blocks are in the order of their tokens, with the incomplete one behind them."""
        block, most = self._index.block, self._index.budget // self._index.block
        table = step.req_to_token_pool.req_to_token
        of_blocks = table[asking.rows, : asking.blocks * block].unflatten(1, (-1, block))  # [G, blocks, block]
        keys = step.kv_cache.layers[self._layer_id].values[of_blocks[..., -1].long(), 0]
        complete = (asking.places + 1) // block  # [G, T]
        shape = *asking.places.shape, *queries.shape[1:]
        products = queries.float().view(shape).flatten(1, 2) @ keys.float().transpose(1, 2)
        scores = products.relu_().unflatten(1, shape[1:3]).sum(dim=2)  # [G, T, blocks]
        numbers = torch.arange(asking.blocks, device=scores.device)
        scores.masked_fill_(numbers >= complete.unsqueeze(-1), -1)
        best = scores.topk(min(most, asking.blocks), dim=-1)
        best_blocks = best.indices.masked_fill(best.values < 0, asking.blocks).sort(dim=-1).values
        taken = complete.clamp_max(best_blocks.shape[-1])
        there = best_blocks.clamp_max(asking.blocks - 1).flatten(1)[..., None].expand(-1, -1, block)
        whole = of_blocks.gather(1, there).unflatten(1, best_blocks.shape[1:]).flatten(2)  # [G, T, taken tokens]
        rest = complete.unsqueeze(-1) * block + torch.arange(block - 1, device=scores.device)
        behind = table[asking.rows[:, None, None], rest.clamp_max(table.shape[1] - 1)]
        slots = torch.cat((whole, whole.new_zeros((*whole.shape[:2], block - 1))), dim=-1)
        # where it is complete, the slots beyond the count are any
        slots.scatter_(2, taken.unsqueeze(-1) * block + torch.arange(block - 1, device=scores.device), behind)
        counts = taken * block + asking.places + 1 - complete * block
        return slots.flatten(0, 1), counts.flatten()


class SparseAttention(GatedAttention):
    """Gated attention to the tokens that an index chooses. layer_id: of the KV cache."""

    def __init__(self, config: ModelConfig, comm: Communicator, layer_id: int) -> None:
        super().__init__(config, comm, layer_id)
        self.indexer = Indexer(config, config.of_part().num_kv_layers + layer_id)

    def attend(self, x: torch.Tensor, own: Projected, rotary: Rotation, forward_batch: ForwardBatch) -> torch.Tensor:
        """See `GatedAttention`."""
        chosen = self.indexer(x, rotary, forward_batch)
        if chosen is None:
            return super().attend(x, own, rotary, forward_batch)
        return forward_batch.attn_backend.attend_chosen(own, self.attn, forward_batch, *chosen)

    def store(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> None:
        """See `GatedAttention`."""
        super().store(x, rotary, forward_batch)
        self.indexer.store(x, rotary, forward_batch)
