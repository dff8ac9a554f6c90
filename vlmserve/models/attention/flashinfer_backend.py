"""Attention by FlashInfer (Ye et al. 2025, arXiv:2501.01005), on NVIDIA GPUs.

A step is planned once and run in every layer. `plan` takes lengths from the host and the table of pages from the
device, so nothing waits for the GPU. These facts hold for flashinfer 0.6.6 and 0.7.2.

`plan` writes to a pinned buffer of the wrapper, which is copied asynchronously (`scheduler.cuh`). The next `plan` must
not come before that copy: see `_planned`.

The float workspace holds partial results of split histories, the int workspace the plan. Wrappers may share both if
their plans are used up in turns, on one stream, as here.

In CUDA graph mode a wrapper has one batch size, and reads index buffers that are ours.
"""

from __future__ import annotations

from typing import Any

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
from vlmserve_common.compute.tensors import dtype_name

HEAD_DIMS = (64, 128, 256)
_LEAST_WORKSPACE = 128 << 20  # bytes; what its documentation recommends
_INT_WORKSPACE = 8 << 20  # bytes, what a wrapper makes for itself
# A tile of queries: rows (heads of a group each) that one block computes. The largest tile, and the decoding tile.
_TILE, _DECODE_TILE = 128, 16


def lacks(spec: AttentionSpec, capability: tuple[int, int] | None) -> str | None:
    """Return what FlashInfer has no kernels for, or None. capability: of the GPU; None: not checked."""
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {dtype_name(spec.dtype)}"
    if spec.cache_dtype not in (spec.dtype, torch.float8_e4m3fn):
        return f"it reads no KV cache of {dtype_name(spec.cache_dtype)}"
    if spec.head_dim not in HEAD_DIMS:
        return f"its heads have {', '.join(map(str, HEAD_DIMS))} elements, and the model's {spec.head_dim}"
    if capability is not None and capability < (8, 0):
        return f"it is used from compute capability 8.0 on, and this GPU has {capability[0]}.{capability[1]}"
    return None


def workspace_bytes(spec: AttentionSpec, *, multiprocessors: int, captured: int = 0) -> int:
    """Return the bytes of the float workspace: most partial results (float32) and their log-sum-exps.

    `PrefillPlan` (scheduler.cuh) splits histories until two blocks a multiprocessor are busy. Each block has a tile of
    queries of one KV head; in a CUDA graph every request has at least one tile. captured: requests of the largest
    graph.
    """
    busy = 2 * multiprocessors // spec.num_kv_heads
    graph = -(-captured * spec.group_size // _DECODE_TILE) + captured
    tiles = max(busy * _TILE, graph * _DECODE_TILE)
    return max(_LEAST_WORKSPACE, tiles * spec.num_heads * (spec.head_dim + 1) * torch.float32.itemsize)


class FlashInferAttentionBackend(AttentionBackend):
    """Decodes steps in which every request has one token; all other steps are prefill. ImportError without the
    package."""

    can_capture = True

    def __init__(self, spec: AttentionSpec) -> None:
        import flashinfer

        self._flashinfer = flashinfer
        self._spec = spec
        on_gpu = spec.device.type == "cuda"
        self._pin = on_gpu
        properties = torch.cuda.get_device_properties(spec.device) if on_gpu else None
        self._multiprocessors = properties.multi_processor_count if properties else 1
        self._workspace = self._zeros(workspace_bytes(spec, multiprocessors=self._multiprocessors))
        self._int_workspace = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=spec.device)
        # FlashAttention-3 is for Hopper alone, and reads an FP8 cache with FP8 queries only.
        hopper = properties is not None and properties.major == 9
        prefill = "fa3" if hopper and spec.cache_dtype == spec.dtype else "fa2"
        self._prefill = self._wrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper, backend=prefill)
        self._decode = self._decode_wrapper()
        self._graphs: dict[int, Any] = {}
        self._buffers: _GraphBuffers | None = None
        self._current: Any = None
        self._page_size = spec.page_size
        self._planned = torch.cuda.Event() if on_gpu else None

    def init_graph_state(self, max_batch_size: int, req_to_token_pool: ReqToTokenPool) -> None:
        """Make index buffers for all batch sizes. A size's wrapper is made when it first comes."""
        size = workspace_bytes(self._spec, multiprocessors=self._multiprocessors, captured=max_batch_size)
        if size > len(self._workspace):
            self._workspace = self._zeros(size)
            for wrapper in (self._prefill, self._decode):
                wrapper.reset_workspace_buffer(self._workspace, self._int_workspace)
        pages = -(-req_to_token_pool.max_context_len // self._spec.page_size)
        self._buffers = _GraphBuffers(max_batch_size, pages, self._spec.device)
        self._graphs = {}

    def init_graph_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a captured step. It has one token a request, and always the KV cache of the first call."""
        assert self._buffers is not None, "init_graph_state comes first"
        size = len(forward_batch.req_pool_indices)
        wrapper = self._graphs.get(size)
        if wrapper is None:
            wrapper = self._graphs[size] = self._decode_wrapper(use_cuda_graph=True, **self._buffers.of(size))
        self._plan(wrapper, forward_batch, self._buffers.indices)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the step."""
        if all(length == 1 for length in forward_batch.extend_lens):
            self._plan(self._decode, forward_batch)
        else:
            queries = self._host(_starts(np.array(forward_batch.extend_lens)))
            self._plan(self._prefill, forward_batch, None, queries, causal=True)

    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attend over the KV cache, which has this step's keys and values already."""
        q = position_and_store(own, layer, forward_batch)
        cache = forward_batch.kv_cache.layers[layer.layer_id]
        paged = tuple(
            part.view(-1, self._page_size, layer.num_kv_heads, layer.head_dim) for part in (cache.keys, cache.values)
        )
        out = q.new_empty(q.shape)  # which the prefill wrapper would clear first
        return self._current.run(q, paged, out=out).flatten(1)

    def _plan(
        self,
        wrapper: Any,
        forward_batch: ForwardBatch,
        indices: torch.Tensor | None = None,
        *queries: torch.Tensor,
        **more: bool,
    ) -> None:
        pages, spec = self._pages(forward_batch, indices), self._spec
        if self._planned is not None:
            # until the last plan is on the device. The step before it has been computed by then, and its own step has
            # not, so the GPU stays busy
            self._planned.synchronize()
        wrapper.plan(
            *queries,
            *pages,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._page_size,
            sm_scale=spec.scaling,
            q_data_type=spec.dtype,
            kv_data_type=spec.cache_dtype,
            **more,
        )
        self._current = wrapper
        if self._planned is not None:
            self._planned.record(torch.cuda.current_stream(spec.device))

    def _pages(
        self, forward_batch: ForwardBatch, indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the start of each request's pages, int32 [B + 1] on the host; the pages, int32 on the device, in the
        front of `indices` if given; and the tokens in each request's last page, int32 [B] on the host."""
        from vlmserve_common.kernels.gpu.page_table import page_indices

        slots, whole = len(forward_batch.kv_cache.layers[0].keys), forward_batch.req_to_token_pool.whole_pages
        # slots of whole pages can be read one by one as well, and must be where the cache or a request cuts pages
        size = self._page_size = 1 if slots % self._spec.page_size or not whole else self._spec.page_size
        tokens = np.array(forward_batch.prefix_lens) + np.array(forward_batch.extend_lens)
        counts = -(-tokens // size)
        starts = self._host(_starts(counts))
        device = self._spec.device
        total = int(counts.sum())
        out = torch.empty(total, dtype=torch.int32, device=device) if indices is None else indices[:total]
        assert len(out) == total, "a captured step has longer requests than init_graph_state was told"
        page_indices(
            forward_batch.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            starts.to(device, non_blocking=True),
            out,
            page_size=size,
            most=int(counts.max()),
        )
        return starts, out, self._host(tokens - (counts - 1) * size)

    def _host(self, values: np.ndarray) -> torch.Tensor:
        """Return an int32 tensor, pinned and new each time: an asynchronous copy may still read the last one."""
        tensor = torch.from_numpy(values.astype(np.int32))
        return tensor.pin_memory() if self._pin else tensor

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._spec.device)

    def _decode_wrapper(self, **graph: Any) -> Any:
        # The plain kernel is for groups of 1, 2, 3, 4 and 8 heads (utils.cuh); tensor cores pay from 4 on.
        spec = self._spec
        tensor_cores = spec.group_size >= 4 or spec.cache_dtype != spec.dtype
        kind = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        # named, because "auto" may take cuDNN, whose plan reads the table of pages back from the device
        return self._wrapper(kind, use_tensor_cores=tensor_cores, backend="fa2", **graph)

    def _wrapper(self, kind: Any, **settings: Any) -> Any:
        wrapper = kind(self._workspace, "NHD", **settings)
        wrapper.reset_workspace_buffer(self._workspace, self._int_workspace)
        return wrapper


class _GraphBuffers:
    """The index buffers of captured kernels. Batches of all sizes share them, from the front on."""

    def __init__(self, max_batch_size: int, max_pages: int, device: torch.device) -> None:
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.starts = zeros(max_batch_size + 1)
        self.indices = zeros(max_batch_size * max_pages)
        self.last_page_lens = zeros(max_batch_size)

    def of(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Return the buffers by the names of the decode wrapper's arguments."""
        return {
            "paged_kv_indptr_buffer": self.starts[: batch_size + 1],
            "paged_kv_indices_buffer": self.indices,
            "paged_kv_last_page_len_buffer": self.last_page_lens[:batch_size],
        }


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], counts.cumsum()))
