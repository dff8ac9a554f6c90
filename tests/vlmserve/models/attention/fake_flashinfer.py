"""A stand-in for FlashInfer's two wrappers of a paged KV cache, in plain torch.

What they read, check and refuse is as in flashinfer 0.6.6 (`decode.py`, `prefill.py`, `utils.cuh`), and they attend
over the tables that `plan` was given. `test_flashinfer_signatures` compares their parameters with the real ones. A
wrapper in CUDA graph mode reads buffers of its owner, which `plan` fills.
"""

from __future__ import annotations

import math

import torch

_GROUPS_WITHOUT_TENSOR_CORES = (1, 2, 3, 4, 8)  # DISPATCH_GQA_GROUP_SIZE
_HEAD_DIMS = (64, 128, 256, 512)  # DISPATCH_HEAD_DIM
_BACKENDS = ("auto", "fa2", "fa3")
plans: list[str] = []
"""The kind of wrapper of each plan, in order."""


class _Wrapper:
    def __init__(self, workspace, kv_layout, *, backend, use_cuda_graph=False):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend in _BACKENDS
        self.workspace, self.int_workspace = workspace, None
        self.use_cuda_graph = use_cuda_graph
        self.buffers = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer

    def _plan(self, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, *, causal, sm_scale, kinds):
        for each in (indptr, indices, last_page_len):
            assert each.dtype == torch.int32  # CHECK_INPUT_TYPE of batch_decode.cu
            assert each.ndim == 1
        assert len(indptr) == len(last_page_len) + 1
        assert indptr[-1] == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert (indptr.diff() >= 0).all()
        assert heads % kv_heads == 0
        assert head_dim in _HEAD_DIMS
        if self.use_cuda_graph:
            starts, table, ends = self.buffers
            if len(last_page_len) != len(ends):
                raise ValueError("The batch size should be fixed in cudagraph mode")
            if len(indices) > len(table):
                raise ValueError("The size of indices should be less than or equal to the allocated buffer")
            starts.copy_(indptr)
            ends.copy_(last_page_len)
            table[: len(indices)].copy_(indices)
        else:
            self.buffers = indptr.clone(), indices.clone(), last_page_len.clone()
        self.shape = (heads, kv_heads, head_dim, page_size)
        self.causal, self.scale = causal, sm_scale or 1 / math.sqrt(head_dim)
        self.kinds = (kinds[0], kinds[1] or kinds[0])
        plans.append(type(self).__name__)

    def _run(self, q, paged_kv_cache, starts_of_queries, out):
        heads, kv_heads, head_dim, page_size = self.shape
        keys, values = paged_kv_cache
        assert isinstance(paged_kv_cache, tuple)
        assert keys.shape[1:] == values.shape[1:] == (page_size, kv_heads, head_dim)
        assert (q.dtype, keys.dtype) == self.kinds  # _check_cached_qkv_data_type
        assert q.shape == (starts_of_queries[-1], heads, head_dim) == out.shape  # check_shape_dtype_device
        assert (out.dtype, q.stride(-1)) == (q.dtype, 1)
        starts, table, ends = self.buffers
        for request in range(len(ends)):
            pages = table[starts[request] : starts[request + 1]].long()
            kept = (len(pages) - 1) * page_size + int(ends[request])
            k, v = (
                part[pages].flatten(0, 1)[:kept].double().repeat_interleave(heads // kv_heads, 1)
                for part in (keys, values)
            )
            mine = q[starts_of_queries[request] : starts_of_queries[request + 1]].double()
            scores = torch.einsum("thd,shd->hts", mine, k) * self.scale
            if self.causal:
                seen = torch.ones(len(mine), kept, dtype=torch.bool).tril(kept - len(mine))
                scores = scores.masked_fill(~seen, -torch.inf)
            answer = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
            out[starts_of_queries[request] : starts_of_queries[request + 1]] = answer.to(q.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One token a request."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        super().__init__(float_workspace_buffer, kv_layout, backend=backend, use_cuda_graph=use_cuda_graph)
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            if len(paged_kv_indptr_buffer) != len(paged_kv_last_page_len_buffer) + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        if not self.use_tensor_cores and num_qo_heads // num_kv_heads not in _GROUPS_WITHOUT_TENSOR_CORES:
            raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        pages = (indptr, indices, last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(*pages, *shape, causal=False, sm_scale=sm_scale, kinds=(q_data_type, kv_data_type))

    def run(self, q, paged_kv_cache, *, out):
        return self._run(q, paged_kv_cache, range(len(self.buffers[2]) + 1), out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of tokens a request."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert qo_indptr.dtype == torch.int32
        assert len(qo_indptr) == len(paged_kv_indptr)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(*pages, *shape, causal=causal, sm_scale=sm_scale, kinds=(q_data_type, kv_data_type))
        self.starts_of_queries = qo_indptr.tolist()

    def run(self, q, paged_kv_cache, *, out):
        return self._run(q, paged_kv_cache, self.starts_of_queries, out)
