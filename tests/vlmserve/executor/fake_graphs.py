"""Graphs without a GPU, and an attention backend that they can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmserve.attention.base import AttentionBackend, ForwardBatch, RadixAttention
from vlmserve.attention.positioning import position_and_store
from vlmserve.attention.torch_backend import TorchAttentionBackend
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.kernels.attention import HeadNorms

_POISON = {torch.bool: True, torch.uint8: 255}


class CallsAgain:
    """Its graphs call again what was captured. replayed: how often they did."""

    def __init__(self) -> None:
        self.replayed = 0

    def capture(self, run: Callable[[], None]) -> CallsAgain._Graph:
        run()
        return self._Graph(self, run)

    class _Graph:
        def __init__(self, owner: CallsAgain, run: Callable[[], None]) -> None:
            self._owner, self._run = owner, run

        def replay(self) -> None:
            self._owner.replayed += 1
            self._run()


class Recorder:
    """Its graphs are as a GPU's: what torch was told to do is done again to the memory that it was done to, and no line
    of Python runs. What was between inputs and outputs is overwritten before."""

    def __init__(self) -> None:
        self.replayed = 0

    def capture(self, run: Callable[[], None]) -> _Recording:
        run()  # to warm up
        recording = _Recording(self)
        with recording:
            run()
        return recording


class _Recording(TorchDispatchMode):
    def __init__(self, owner: Recorder) -> None:
        super().__init__()
        self._owner = owner
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} waits for the device, which a capture forbids")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self._owner.replayed += 1
        outer = {_memory(leaf) for _, args, kwargs, _ in self._calls for leaf in _tensors((args, kwargs))}
        for _, args, kwargs, out in self._calls:
            for made in _tensors(out):
                if _memory(made) not in {_memory(leaf) for leaf in _tensors((args, kwargs))}:
                    outer.discard(_memory(made))
                    made.fill_(_POISON.get(made.dtype, torch.nan if made.is_floating_point() else -(10**6)))
        assert outer, "a graph without inputs"
        for func, args, kwargs, out in self._calls:
            for kept, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if _memory(kept) != _memory(new):
                    kept.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class PagedBackend(AttentionBackend):
    """Decodes with a few calls of torch over whole rows of the request table; extends as torch's backend does."""

    can_capture = True

    def __init__(self) -> None:
        self._extend = TorchAttentionBackend()
        self._size = 0  # of a captured step; 0: another

    def init_graph_state(self, max_batch_size: int, req_to_token_pool: ReqToTokenPool) -> None:
        context = req_to_token_pool.max_context_len
        self._slots = torch.zeros(max_batch_size, context, dtype=torch.int32)
        self._seen = torch.zeros(max_batch_size, context, dtype=torch.bool)

    def init_graph_metadata(self, forward_batch: ForwardBatch) -> None:
        self._size = size = len(forward_batch.extend_lens)
        assert len(forward_batch.prefix_lens) == size
        assert forward_batch.seq_lens.tolist() == [length + 1 for length in forward_batch.prefix_lens]
        table = forward_batch.req_to_token_pool.req_to_token
        self._slots[:size] = table[forward_batch.req_pool_indices]
        self._seen[:size] = torch.arange(table.shape[1]) < forward_batch.seq_lens[:, None]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._size = 0
        self._extend.init_forward_metadata(forward_batch)

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: Rotation,
        norms: HeadNorms | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        if not self._size:
            return self._extend.forward(qkv, rotary, norms, layer, forward_batch)
        q = position_and_store(qkv, rotary, norms, layer, forward_batch)[:, :, None]
        past = forward_batch.kv_cache.read(layer.layer_id, self._slots[: self._size], q.dtype)
        k, v = (part.transpose(1, 2).repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for part in past)
        seen = self._seen[: self._size, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=layer.scaling).flatten(1)


class ForgetfulBackend(PagedBackend):
    """One that must not be captured: it makes its buffers anew in each step."""

    def init_graph_metadata(self, forward_batch: ForwardBatch) -> None:
        self._slots, self._seen = self._slots.clone(), self._seen.clone()
        super().init_graph_metadata(forward_batch)
