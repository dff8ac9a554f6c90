"""Runs one step on the device: ModelWorkerBatch -> ForwardBatch -> model -> sampler -> ModelWorkerResult.

In two halves: what a step is sampled by may depend on tokens that come while it is computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from vlmserve.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.executor.graphs.decode import DecodeGraphs
from vlmserve.executor.logits_processors import LogitsProcessors
from vlmserve.executor.logprobs import DeviceLogprobs, prompt_logprobs
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, ModelWorkerResult, SamplingBatchInfo
from vlmserve.executor.sampler import sample
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.kv_transfer import KVTransfer
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.vlm import VisionLanguageModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Forwarded:
    """A step that is not sampled yet. hidden: [N, hidden], of its tokens. returned: float32 [H, hidden], of those that
    are to be returned. seconds: that it took so far."""

    step: int
    req_pool_indices: np.ndarray
    hidden: torch.Tensor
    returned: torch.Tensor | None
    prompt_logprobs: DeviceLogprobs | None
    seconds: float


class ModelRunner:
    """A worker's whole state: model, KV cache, request table, last sampled tokens."""

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        kv_cache: KVCache,
        req_to_token_pool: ReqToTokenPool,
        attn_backend: AttentionBackend,
        device: torch.device,
        logits_processors: LogitsProcessors | None = None,
    ) -> None:
        self._kv_transfer: KVTransfer | None = None
        self._graphs: DecodeGraphs | None = None
        self.model = model
        self.kv_cache = kv_cache
        self.req_to_token_pool = req_to_token_pool
        self.attn_backend = attn_backend
        self.device = device
        self._logits_processors = logits_processors
        self._last_tokens = torch.zeros(req_to_token_pool.size, dtype=torch.int64, device=device)

    def attach_host_tier(self, transfer: KVTransfer) -> None:
        """From now on steps may bring copies between the tiers of the KV cache."""
        self._kv_transfer = transfer

    def attach_graphs(self, graphs: DecodeGraphs) -> None:
        """From now on steps that fit are replayed."""
        self._graphs = graphs

    @torch.inference_mode()
    def forward(self, batch: ModelWorkerBatch) -> Forwarded:
        """Compute a step as far as the hidden states of its tokens. Side effects in this order: copies between the
        tiers of the KV cache, request table, KV cache."""
        began = time.perf_counter()
        if batch.kv_copies:
            assert self._kv_transfer is not None, "KV to copy, and no second tier"
            self._kv_transfer.run(batch.kv_copies)
        forward_batch = self._prepare(batch)
        if self._graphs is not None and self._graphs.fits(forward_batch):
            hidden = self._graphs.run(forward_batch)
        else:
            hidden = self._eager(batch, forward_batch)
        asked = batch.prompt_logprobs
        vocab = self.model.config.vocab_size
        return Forwarded(
            step=batch.step,
            req_pool_indices=batch.req_pool_indices,
            hidden=hidden,
            returned=hidden[self._tensor(batch.hidden_tokens)].float() if len(batch.hidden_tokens) else None,
            prompt_logprobs=prompt_logprobs(hidden, asked, self.model.compute_logits, vocab) if asked else None,
            seconds=time.perf_counter() - began,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        # arrays decoded from a message are read-only views of its frames
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)

    def _prepare(self, batch: ModelWorkerBatch) -> ForwardBatch:
        pool = self.req_to_token_pool
        for prefix in batch.prefix_slots:
            pool.write(prefix.req_pool_idx, 0, self._tensor(prefix.slots))
        out_cache_loc = self._tensor(batch.out_cache_loc)
        extend_lens = batch.seq_lens - batch.prefix_lens
        owners = np.repeat(batch.req_pool_indices, extend_lens)
        before = batch.prefix_lens - (extend_lens.cumsum() - extend_lens)
        pool.write_tokens(owners, np.arange(len(owners)) + np.repeat(before, extend_lens), out_cache_loc)
        input_ids = self._tensor(batch.input_ids)
        if (batch.input_ids < 0).any():
            input_ids = torch.where(input_ids < 0, self._last_tokens[self._tensor(owners)], input_ids)
        return ForwardBatch(
            forward_mode=ForwardMode(batch.forward_mode),
            input_ids=input_ids,
            positions=self._tensor(batch.positions),
            req_pool_indices=self._tensor(batch.req_pool_indices),
            seq_lens=self._tensor(batch.seq_lens.astype(np.int32)),
            extend_start_loc=self._tensor(np.concatenate(([0], extend_lens.cumsum()), dtype=np.int32)),
            prefix_lens=batch.prefix_lens.tolist(),
            extend_lens=extend_lens.tolist(),
            out_cache_loc=out_cache_loc,
            req_to_token_pool=pool,
            kv_cache=self.kv_cache,
            attn_backend=self.attn_backend,
        )

    def _eager(self, batch: ModelWorkerBatch, forward_batch: ForwardBatch) -> torch.Tensor:
        embeds, mm_index, deepstack = self._embed(batch, forward_batch.input_ids)
        self.attn_backend.init_forward_metadata(forward_batch)
        return self.model.forward(
            embeds,
            forward_batch.positions,
            forward_batch,
            deepstack_index=mm_index,
            deepstack_embeds=deepstack,
        )

    def _embed(
        self, batch: ModelWorkerBatch, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Text embeddings with this step's vision embeddings in place of its R pad tokens; where those are, and their
        DeepStack embeddings [num_deepstack, R, hidden]."""
        embeds = self.model.embed_tokens(input_ids)
        for part in batch.input_embeds:
            embeds[part.token : part.token + len(part.embeds)] = part.embeds.to(embeds)
        if not batch.mm_embeds:
            return embeds, None, None
        mm_embeds = torch.cat([part.embeds.to(self.device) for part in batch.mm_embeds])
        tokens = [torch.arange(part.token, part.token + len(part.embeds)) for part in batch.mm_embeds]
        index = torch.cat(tokens).to(self.device)
        parts = mm_embeds.to(embeds.dtype).view(len(mm_embeds), -1, embeds.shape[1]).transpose(0, 1)
        embeds = embeds.index_copy(0, index, parts[0])
        return embeds, index, parts[1:] if len(parts) > 1 else None

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded, info: SamplingBatchInfo) -> ModelWorkerResult:
        """The tokens of a step; they become the last ones of their requests."""
        began = time.perf_counter()
        prompt = forwarded.prompt_logprobs.to_host() if forwarded.prompt_logprobs is not None else None
        returned = forwarded.returned.cpu().numpy() if forwarded.returned is not None else None
        if not len(info.batch_indices):
            none = np.zeros(0, np.float32)
            ids = np.zeros(0, np.int64)
            return ModelWorkerResult(
                step=forwarded.step,
                compute_s=forwarded.seconds,
                next_token_ids=ids,
                logprobs=none,
                top_ids=ids.reshape(0, 0),
                top_logprobs=none.reshape(0, 0),
                prompt_logprobs=prompt,
                hidden_states=returned,
            )
        hidden = forwarded.hidden
        if len(info.token_indices) < len(hidden):
            hidden = hidden.index_select(0, self._tensor(info.token_indices))
        out = sample(self.model.compute_logits(hidden), info, self._logits_processors)
        sampled = self._tensor(forwarded.req_pool_indices[info.batch_indices])
        self._last_tokens.index_copy_(0, sampled, out.next_token_ids)
        tokens = out.next_token_ids.cpu().numpy()
        return ModelWorkerResult(
            step=forwarded.step,
            compute_s=forwarded.seconds + time.perf_counter() - began,
            next_token_ids=tokens,
            logprobs=out.logprobs.cpu().numpy(),
            top_ids=out.top_ids.cpu().numpy(),
            top_logprobs=out.top_logprobs.cpu().numpy(),
            asked_logprobs=out.asked_logprobs.cpu().numpy(),
            prompt_logprobs=prompt,
            hidden_states=returned,
            failures=out.failures,
        )
