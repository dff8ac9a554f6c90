"""Attention by our own kernels in Triton: for GPUs, and under Triton's interpreter for tests.

Requests with one token go to the decode kernel, all other requests to the extend kernel, also in mixed steps. So a
request's answer does not depend on its batch mates. Nothing is read back from the device.
"""

from __future__ import annotations

import numpy as np
import torch

from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import (
    AttentionBackend,
    AttentionSpec,
    ForwardBatch,
    Projected,
    RadixAttention,
    position_and_store,
)
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.kernels.gpu.decode import SplitWorkspace, decode_attention
from vlmserve_common.kernels.gpu.extend import extend_attention, extend_tiles, tile_tokens


class TritonAttentionBackend(AttentionBackend):
    """Holds the current step's arguments, and the workspace of the decode kernel."""

    can_capture = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._step = _Step(np.zeros(0, np.int64), np.zeros(0, np.int64))
        # the last is in use; captured graphs may read and write those before it
        self._workspaces: list[SplitWorkspace] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Note the step's requests."""
        self._step = _Step(np.asarray(forward_batch.prefix_lens), np.asarray(forward_batch.extend_lens))

    def reserve(self, max_requests: int, max_context_len: int) -> None:
        """Allocate the workspace of the decode kernel."""
        self._workspace(max_requests, max_context_len)

    def init_graph_state(self, max_batch_size: int, req_to_token_pool: ReqToTokenPool) -> None:
        """Allocate a workspace that captured steps keep."""
        self._workspace(max_batch_size, req_to_token_pool.max_context_len)

    def init_graph_metadata(self, forward_batch: ForwardBatch) -> None:
        """Note the step's requests; the kernels read the rest from its tensors."""
        self.init_forward_metadata(forward_batch)

    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attend, with one kernel or both."""
        q = position_and_store(own, layer, forward_batch)
        cache = forward_batch.kv_cache.layers[layer.layer_id]
        table = forward_batch.req_to_token_pool.req_to_token
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rows = (forward_batch.req_pool_indices, forward_batch.seq_lens)
        step, starts = self._step, forward_batch.extend_start_loc
        if step.singles:
            requests = step.single_requests(q.device)
            decode_attention(
                q,
                cache,
                table,
                *rows,
                scale=layer.scaling,
                out=out,
                workspace=self._workspace(step.singles, table.shape[1]),
                requests=requests,
                starts=None if requests is None else starts,
            )
        if step.singles < step.requests:
            tiles = step.tiles(tile_tokens(q.dtype, cache, layer.num_heads), q.device)
            extend_attention(q, cache, table, *rows, starts, tiles, scale=layer.scaling, out=out)
        return out.flatten(1)

    def _workspace(self, batch: int, context: int) -> SplitWorkspace:
        spec = self._spec
        shape = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads, "dim": spec.head_dim, "context": context}
        if not self._workspaces or not self._workspaces[-1].holds(batch=batch, **shape):
            self._workspaces.append(SplitWorkspace.make(batch=batch, device=spec.device, **shape))
        return self._workspaces[-1]


class _Step:
    """A step's requests. Tensors are made when a layer first asks for them."""

    def __init__(self, prefix_lens: np.ndarray, extend_lens: np.ndarray) -> None:
        self._prefix_lens = prefix_lens
        self._extend_lens = extend_lens
        self._single = extend_lens == 1
        self.requests = len(extend_lens)
        self.singles = int(self._single.sum())
        self._single_requests: torch.Tensor | None = None
        self._tiles: dict[int, torch.Tensor] = {}

    def single_requests(self, device: torch.device) -> torch.Tensor | None:
        """Requests with one token, int32 [singles]; None if all are."""
        if self.singles == self.requests:
            return None
        if self._single_requests is None:
            singles = np.flatnonzero(self._single).astype(np.int32)
            self._single_requests = to_device(torch.from_numpy(singles), device)
        return self._single_requests

    def tiles(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Return `extend_tiles` of requests with several tokens, for tiles of so many tokens."""
        if tokens not in self._tiles:
            several = np.flatnonzero(~self._single)
            tiles = extend_tiles(self._prefix_lens, self._extend_lens, tokens, several)
            self._tiles[tokens] = to_device(torch.from_numpy(tiles), device)
        return self._tiles[tokens]
