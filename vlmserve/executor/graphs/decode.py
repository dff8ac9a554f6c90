"""Decode steps captured at a few sizes, and replayed at the next larger one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from vlmserve.executor.graphs.buffers import DecodeBuffers
from vlmserve.executor.model_worker_batch import ModelWorkerBatch
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.graphs import Capturer, Graph


class DecodeGraphs:
    """Embedding, layers and final norm of steps with one token a request.

    The head is not in it: it is two launches, its float32 logits would be the largest buffer of all, and steps differ
    in which rows they sample.

    max_batch_size: requests of the largest step. sizes: of those that are captured, ascending; none at first.
    recurrent_cache: for models with recurrent layers; has a padding state.
    """

    @torch.inference_mode()
    def __init__(
        self,
        max_batch_size: int,
        *,
        model: VisionLanguageModel,
        kv_cache: KVCache,
        req_to_token_pool: ReqToTokenPool,
        attn_backend: AttentionBackend,
        capturer: Capturer,
        recurrent_cache: RecurrentCache | None = None,
    ) -> None:
        self.sizes: tuple[int, ...] = ()
        self._model = model
        self._attn_backend = attn_backend
        self._buffers = DecodeBuffers(
            max_batch_size,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=req_to_token_pool.req_to_token.device,
            req_to_token_pool=req_to_token_pool,
            kv_cache=kv_cache,
            attn_backend=attn_backend,
            recurrent_cache=recurrent_cache,
        )
        self._capturer = capturer
        self._graphs: dict[int, tuple[ForwardBatch, Graph]] = {}
        attn_backend.init_graph_state(max_batch_size, req_to_token_pool)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Steps of so many requests each. RuntimeError as `Capturer.capture` raises it; those before are there then."""
        for size in sorted(sizes, reverse=True):  # see `Capturer`
            self._graphs[size] = self._captured(size)
            self.sizes = tuple(sorted(self._graphs))

    def drop(self, size: int) -> None:
        """Have no graph of that size, if there is one."""
        self._graphs.pop(size, None)
        self.sizes = tuple(sorted(self._graphs))

    def _captured(self, size: int) -> tuple[ForwardBatch, Graph]:
        batch = self._buffers.padded(size)
        self._attn_backend.init_graph_metadata(batch)

        model, hidden = self._model, self._buffers.hidden[:size]

        def run() -> None:
            embeds = model.embed_tokens(batch.input_ids)
            # copied, so that the graphs need not keep an output each
            hidden.copy_(model.forward(embeds, batch.positions, batch))

        return batch, self._capturer.capture(run)

    def size_for(self, steps: Sequence[ForwardBatch | ModelWorkerBatch]) -> int | None:
        """The smallest captured size that holds each of some steps; None: there is none. Those that decode only have
        neither pictures nor prompts."""
        if any(step.forward_mode != ForwardMode.DECODE for step in steps):
            return None
        index = bisect_left(self.sizes, max(len(step.req_pool_indices) for step in steps))
        return self.sizes[index] if index < len(self.sizes) else None

    @torch.inference_mode()
    def run(self, forward_batch: ForwardBatch, size: int) -> torch.Tensor:
        """Final hidden states [B, hidden] of a step that only decodes, as one of `size` requests, which is captured and
        not less than B. The next one overwrites them."""
        static, graph = self._graphs[size]
        self._attn_backend.init_graph_metadata(self._buffers.load(static, forward_batch))
        graph.replay()
        return self._buffers.hidden[: len(forward_batch.extend_lens)]

    @torch.inference_mode()
    def join(self, size: int) -> None:
        """Replay a captured step of which all requests are padding."""
        self._attn_backend.init_graph_metadata(self._buffers.padded(size))
        self._graphs[size][1].replay()
