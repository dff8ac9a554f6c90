"""Decode steps captured as CUDA graphs for a few batch sizes. A step is replayed at the next larger size."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from vlmserve.executor.model_worker_batch import ModelWorkerBatch
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.graphs import Capturer, Graph
from vlmserve_common.compute.lora_tables import AdapterTables

# Rows of the int64 tensor. Positions are next to each other, so that they are one contiguous [3, size].
_INPUT_IDS, _POSITIONS, _REQ_POOL_INDICES, _OUT_CACHE_LOC, _STATES = 0, slice(1, 4), 4, 5, 6
# In the dummy page, which the allocator never hands out.
_PADDING_SLOT = 0


class DecodeGraphs:
    """Graphs of the embedding, layers and final norm of steps with one token a request.

    The head is not captured. It is two launches, its float32 logits would be the largest buffer of all, and steps
    differ in which rows they sample.

    Steps of all sizes lie in the same static memory, one at a time. A step with too few requests is padded by requests
    of one token. These use the pool's padding row, the dummy page's first slot and recurrent layers' padding state.

    max_batch_size: requests of the largest step. sizes: of the captured steps, ascending; none at first.
    recurrent_cache: for models with recurrent layers; has a padding state. adapters: makes the tables by which LoRA
    adapters change steps of so many rows; each size is then captured twice, with adapters and without. hidden:
    [max_batch_size, hidden], the output of a step. tapped: see `ForwardBatch`; of the last step.
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
        adapters: Callable[[int], AdapterTables] | None = None,
    ) -> None:
        self._tables = None if adapters is None else adapters(max_batch_size)
        self.sizes: tuple[int, ...] = ()
        self._model, self._kv_cache, self._req_to_token_pool = model, kv_cache, req_to_token_pool
        self._attn_backend, self._capturer, self._recurrent_cache = attn_backend, capturer, recurrent_cache
        self._graphs: dict[int, tuple[ForwardBatch, Graph, Graph | None]] = {}
        attn_backend.init_graph_state(max_batch_size, req_to_token_pool)
        self._num_rows = _STATES if recurrent_cache is None else _STATES + 1
        device = req_to_token_pool.req_to_token.device
        self.hidden = torch.zeros(max_batch_size, model.config.hidden_size, dtype=model.dtype, device=device)
        layers = len(model.language_model.tapped)
        self.tapped = self.hidden.new_zeros((layers, max_batch_size, model.config.stream_size))
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

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture steps of these sizes. RuntimeError as `Capturer.capture` raises it; graphs captured before stay."""
        for size in sorted(sizes, reverse=True):  # see `Capturer`
            self._graphs[size] = self._captured(size)
            self.sizes = tuple(sorted(self._graphs))

    def drop(self, size: int) -> None:
        """Drop the graph of that size, if there is one."""
        self._graphs.pop(size, None)
        self.sizes = tuple(sorted(self._graphs))

    def _captured(self, size: int) -> tuple[ForwardBatch, Graph, Graph | None]:
        batch = self._padded(size)
        self._attn_backend.init_graph_metadata(batch)
        model, hidden = self._model, self.hidden[:size]

        def run() -> None:
            embeds = model.embed_tokens(batch.input_ids)
            # copied, so that the graphs need not keep an output each
            hidden.copy_(model.forward(embeds, batch.positions, batch))

        tables = self._tables
        if tables is None:
            return batch, self._capturer.capture(run), None

        def run_adapted() -> None:
            with tables.active.by(tables):
                run()

        return batch, self._capturer.capture(run), self._capturer.capture(run_adapted)

    @property
    def takes_adapters(self) -> bool:
        """Whether a step with the active adapters can be replayed."""
        return self._tables is not None and self._tables.can_hold

    def size_for(self, steps: Sequence[ForwardBatch | ModelWorkerBatch]) -> int | None:
        """Return the smallest captured size that holds each of some steps. None if there is none, or if a step does
        more than decode."""
        if any(step.forward_mode != ForwardMode.DECODE for step in steps):
            return None
        index = bisect_left(self.sizes, max(len(step.req_pool_indices) for step in steps))
        return self.sizes[index] if index < len(self.sizes) else None

    @torch.inference_mode()
    def run(self, forward_batch: ForwardBatch, size: int) -> torch.Tensor:
        """Replay a step that only decodes, with the graph of `size` >= B requests, and with the active adapters. Return
        its final hidden states [B, hidden], which the next replay overwrites."""
        static, graph, adapted = self._graphs[size]
        self._attn_backend.init_graph_metadata(self.load(static, forward_batch))
        if self._tables is not None and self._tables.active.adapters:
            assert adapted is not None, "tables, and no captured step with adapters"
            self._tables.hold()
            adapted.replay()
        else:
            graph.replay()
        return self.hidden[: len(forward_batch.extend_lens)]

    @torch.inference_mode()
    def join(self, size: int) -> None:
        """Replay a captured step whose requests are all padding, so that other groups' collectives find this rank."""
        self._attn_backend.init_graph_metadata(self._padded(size))
        self._graphs[size][1].replay()

    def _padded(self, size: int) -> ForwardBatch:
        """Return a step of `size` requests that are all padding. Its tensors are those of every step of that size."""
        rows = self._of_size(size)
        torch._foreach_copy_(
            [*rows.unbind(), self._seq_lens[:size]], [*self._padding[:, :size].unbind(), self._padding_lens[:size]]
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
            tapped=self.tapped[:, :size],
            recurrent=None
            if self._recurrent_cache is None
            else RecurrentStep(cache=self._recurrent_cache, spans=(), single_states=rows[_STATES]),
        )

    def load(self, static: ForwardBatch, step: ForwardBatch) -> ForwardBatch:
        """Copy a step of no more requests into the tensors of `static`, which `capture` made. Return it with the step's
        host lists. This takes two launches on a GPU, whatever the sizes."""
        size, count = len(static.extend_lens), len(step.extend_lens)
        rows = self._of_size(size)
        given = [step.input_ids, *step.positions.unbind(), step.req_pool_indices, step.out_cache_loc]
        if step.recurrent is not None:
            assert step.recurrent.single_states is not None
            given.append(step.recurrent.single_states)
        targets, lens = [*rows[:, :count].unbind()], [self._seq_lens[:count]]
        given_lens, more = [step.seq_lens], size - count
        if more:
            targets += rows[:, count:].unbind()
            given += self._padding[:, :more].unbind()
            lens.append(self._seq_lens[count:size])
            given_lens.append(self._padding_lens[:more])
        # one launch for each dtype
        torch._foreach_copy_(targets, given)
        torch._foreach_copy_(lens, given_lens)
        return dataclasses.replace(
            static, prefix_lens=step.prefix_lens + [0] * more, extend_lens=step.extend_lens + [1] * more
        )

    def _of_size(self, size: int) -> torch.Tensor:
        return self._rows[: self._num_rows * size].view(self._num_rows, size)
