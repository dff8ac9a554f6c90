"""Runs one step on the device: ModelWorkerBatch -> ForwardBatch -> model -> sampler -> ModelWorkerResult.

A step has two halves, because its sampling may depend on tokens that come while it is computed. Each half uploads its
inputs in one copy, and the results are downloaded in one. On a GPU both halves only launch, so the next step can be
launched behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from vlmserve.executor.cuda_graphs import DecodeGraphs
from vlmserve.executor.draft_model import DraftModelDrafter
from vlmserve.executor.drafters import Drafter, EagleDrafter, MTPDrafter
from vlmserve.executor.expert_balancer import ExpertBalancer
from vlmserve.executor.launched_step import Forwarded, LaunchedResult, device_errors
from vlmserve.executor.logits_processors import LogitsProcessors
from vlmserve.executor.logprobs import prompt_logprobs
from vlmserve.executor.model_worker_batch import (
    RECENT_TOKENS,
    MMEmbeds,
    ModelWorkerBatch,
    PendingResult,
    SamplingBatchInfo,
)
from vlmserve.executor.sampler import SamplerOutput, sample
from vlmserve.executor.sampler_inputs import SamplerInputs
from vlmserve.executor.step_inputs import StepInputs, guess_rounds, returned_states
from vlmserve.ipc.messages import ExpertStats
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.kv_transfer import KVTransfer
from vlmserve.memory.recurrent_cache import GuessedTokens, RecurrentCache, RecurrentStep, Span
from vlmserve.memory.recurrent_states import StateCopy
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.adapter_store import AdapterStore
from vlmserve_common.compute.communicator import Link
from vlmserve_common.compute.transfers import Transfers, Upload, to_device, transfers_for


class ModelRunner:
    """A worker's whole state: model, KV cache, request table, last sampled tokens.

    recurrent_cache: for models with recurrent layers. groups: attention groups whose last sampled tokens are known
    here, those of one group behind those of the other (see `GroupLeader`). transfers: to and from the device; by
    default the usual ones. draft_backend: attention of an EAGLE-3 head, or of a smaller model that guesses.
    """

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        kv_cache: KVCache,
        req_to_token_pool: ReqToTokenPool,
        attn_backend: AttentionBackend,
        device: torch.device,
        recurrent_cache: RecurrentCache | None = None,
        logits_processors: LogitsProcessors | None = None,
        groups: int = 1,
        transfers: Transfers | None = None,
        draft_backend: AttentionBackend | None = None,
    ) -> None:
        self.kv_transfer: KVTransfer | None = None
        self._graphs: DecodeGraphs | None = None
        self._balancer: ExpertBalancer | None = None
        self.adapters: AdapterStore | None = None
        self.model = model
        self.kv_cache = kv_cache
        self.recurrent_cache = recurrent_cache
        self.req_to_token_pool = req_to_token_pool
        self.attn_backend = attn_backend
        self.device = device
        self._transfers = transfers or transfers_for(device)
        self._logits_processors = logits_processors
        self._drafter: Drafter | None = None
        if model.mtp is not None:
            assert recurrent_cache is not None, "an MTP head goes on from states"
            self._drafter = MTPDrafter(model, model.mtp, recurrent_cache)
        elif model.eagle is not None:
            assert draft_backend is not None, "an EAGLE-3 head attends"
            self._drafter = EagleDrafter(model, model.eagle, draft_backend)
        elif model.draft is not None:
            assert draft_backend is not None, "a smaller model attends"
            self._drafter = DraftModelDrafter(
                model, model.draft, draft_backend, kv_cache, req_to_token_pool, self._transfers
            )
        # the token at each place of a request, by that modulo RECENT_TOKENS
        self._recent = torch.zeros((groups * req_to_token_pool.size, RECENT_TOKENS), dtype=torch.int64, device=device)

    def attach_host_tier(self, transfer: KVTransfer) -> None:
        """Allow steps to copy KV between the tiers of the cache from now on."""
        self.kv_transfer = transfer

    def attach_graphs(self, graphs: DecodeGraphs) -> None:
        """Replay steps that fit from now on."""
        self._graphs = graphs

    def attach_balancer(self, balancer: ExpertBalancer) -> None:
        """Move experts between steps from now on."""
        self._balancer = balancer

    def attach_adapters(self, adapters: AdapterStore) -> None:
        """Compute with adapters from now on, where a step says so."""
        self.adapters = adapters

    def expert_stats(self) -> ExpertStats:
        """Return how evenly experts are spread."""
        return ExpertStats() if self._balancer is None else self._balancer.stats

    @torch.inference_mode()
    def forward(self, batch: ModelWorkerBatch, together: Sequence[ModelWorkerBatch | None] = ()) -> Forwarded:
        """Compute a step as far as the hidden states of its tokens.

        Side effects in this order: copies between the tiers of the KV cache and of states, request table, states that
        go on behind right guesses, KV cache and states, snapshots of states. together: the steps of all groups, which
        are computed at the same time. All of them are replayed or none is; the result then outlives further replays.
        Raises as `device_errors` does.
        """
        with device_errors(
            f"step {batch.step} of {len(batch.req_pool_indices)} requests, {len(batch.input_ids)} tokens"
        ):
            began = self._transfers.mark()
            if self._balancer is not None:
                self._balancer.step()
            if batch.kv_copies:
                # without a second tier, KV is copied on the device only
                (self.kv_transfer or KVTransfer(self.kv_cache, 0)).run(batch.kv_copies)
            self._copy_states(batch.state_copies)
            inputs, forward_batch = self._prepare(batch)
            if inputs.advances is not None:
                assert self.recurrent_cache is not None, "states to advance, and no recurrent layers"
                self.recurrent_cache.advance(*(part.tensor for part in inputs.advances))
            if self._drafter is not None:
                self._drafter.begin(forward_batch, inputs)
            guesses = self._guess(forward_batch, inputs, guess_rounds(together or [batch]))
            with self._adapted(batch, inputs):
                size = None
                if self._graphs is not None and (not batch.adapters or self._graphs.takes_adapters):
                    size = self._graphs.size_for([*filter(None, together)] or [batch])
                if self._graphs is not None and size is not None:
                    hidden = self._graphs.run(forward_batch, size)
                    forward_batch = replace(forward_batch, tapped=self._graphs.tapped[:, : len(hidden)])
                    if together:  # they may replay again before this one is sampled
                        hidden = hidden.clone()
                else:
                    forward_batch = replace(forward_batch, tapped=self._room_for_taps(len(batch.input_ids)))
                    hidden = self._run(forward_batch, *self._embed(batch, forward_batch, inputs))
            if self._drafter is not None:
                self._drafter.extend(forward_batch, inputs, hidden)
            self._copy_states(_ends_kept(batch))
            tiles = inputs.prompt_tiles
            return Forwarded(
                step=batch.step,
                req_pool_indices=batch.req_pool_indices,
                places=inputs.places,
                hidden=hidden,
                returned=None
                if inputs.hidden_tokens is None
                else returned_states(hidden, inputs.hidden_tokens.tensor, batch),
                prompt_logprobs=prompt_logprobs(hidden, tiles, self.model.compute_logits) if tiles else None,
                began=began,
                ended=self._transfers.mark(),
                drafts=guesses,
            )

    def _adapted(self, batch: ModelWorkerBatch, inputs: StepInputs) -> AbstractContextManager[None]:
        """Return the context in which a step's adapters change its rows."""
        if not batch.adapters:
            return nullcontext()
        assert self.adapters is not None, "adapters, and no store of adapters"
        return self.adapters.rows(batch.adapters, inputs.extend_lens.tolist())

    @torch.inference_mode()
    def join(self, together: Sequence[ModelWorkerBatch | None]) -> None:
        """Join the collectives of other groups' steps while this group has no tokens: see `Decoder.join`. together: the
        steps of all groups."""
        if self._balancer is not None:
            self._balancer.step()
        if self._drafter is not None:
            self._drafter.join(guess_rounds(together))
        size = None if self._graphs is None else self._graphs.size_for([*filter(None, together)])
        if self._graphs is not None and size is not None:
            self._graphs.join(size)
        else:
            self.model.language_model.join()

    def _prepare(self, batch: ModelWorkerBatch) -> tuple[StepInputs, ForwardBatch]:
        """Upload a step's inputs, and write where its tokens lie to the request table."""
        pool = self.req_to_token_pool
        upload = Upload(self._transfers)
        inputs = StepInputs(batch, self.model, upload)
        pool.check_tokens(*inputs.table_host)
        upload.send()
        windows = inputs.window_table_slots
        pool.write_tokens(
            inputs.table_rows.tensor,
            inputs.table_places.tensor,
            inputs.table_slots.tensor,
            None if windows is None else windows.tensor,
        )
        input_ids = inputs.input_ids.tensor
        if inputs.sampled_last is not None:
            rows, recent = inputs.sampled_last
            input_ids = torch.where(input_ids < 0, self._recent[rows.tensor, recent.tensor], input_ids)
        return inputs, ForwardBatch(
            forward_mode=ForwardMode(batch.forward_mode),
            input_ids=input_ids,
            positions=inputs.positions.tensor,
            req_pool_indices=inputs.req_pool_indices.tensor,
            seq_lens=inputs.seq_lens.tensor,
            extend_start_loc=inputs.extend_start_loc.tensor,
            prefix_lens=batch.prefix_lens.tolist(),
            extend_lens=inputs.extend_lens.tolist(),
            out_cache_loc=inputs.out_cache_loc.tensor,
            window_cache_loc=None if inputs.window_cache_loc is None else inputs.window_cache_loc.tensor,
            req_to_token_pool=pool,
            kv_cache=self.kv_cache,
            attn_backend=self.attn_backend,
            recurrent=self._recurrent_step(batch, inputs),
        )

    def _copy_states(self, jobs: Sequence[StateCopy]) -> None:
        if jobs:
            assert self.recurrent_cache is not None, "states to copy, and no recurrent layers"
            self.recurrent_cache.copy(jobs)

    def _recurrent_step(self, batch: ModelWorkerBatch, inputs: StepInputs) -> RecurrentStep | None:
        if self.recurrent_cache is None:
            return None
        kept: dict[int, dict[int, int]] = {}
        for snapshot in batch.state_snapshots:
            kept.setdefault(snapshot.index, {})[snapshot.tokens] = snapshot.target
        lengths = inputs.extend_lens.tolist()
        starts = (inputs.extend_lens.cumsum() - inputs.extend_lens).tolist()
        return RecurrentStep(
            cache=self.recurrent_cache,
            spans=tuple(
                Span(start=start, length=length, prefix_len=before, state=state, kept=kept.get(index, {}))
                for index, (start, length, before, state) in enumerate(
                    zip(starts, lengths, batch.prefix_lens.tolist(), batch.states.tolist(), strict=True)
                )
                if length > 1 and not (len(batch.num_drafts) and batch.num_drafts[index])
            ),
            guessed=tuple(
                GuessedTokens(tokens=tokens.tensor, states=states.tensor, rows=rows.tensor)
                for tokens, states, rows in inputs.guessed
            ),
            single_states=inputs.single_states.tensor if inputs.single_states is not None else None,
            single_tokens=inputs.single_tokens.tensor if inputs.single_tokens is not None else None,
        )

    def _guess(self, step: ForwardBatch, inputs: StepInputs, rounds: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
        """Have the guesses of all groups made. Return this group's, as far as this process knows them.

        In a pipeline, the first stage has to know them. If the last one makes them, it sends them there.
        """
        stage, link, drafts = self.model.comm.shard.stage, self.model.comm.guesses, inputs.drafts
        if drafts is None:
            if self._drafter is not None:
                self._drafter.join(rounds)
            return None
        tokens = drafts.tokens.tensor
        if self._drafter is not None:
            self._drafter.draft(step, inputs, rounds)
            if not stage.is_first:
                assert link is not None, "an outline does not compute"
                link.send(step.input_ids[tokens])
        elif stage.is_first:
            assert link is not None, "guesses to be made, and nothing to make them"
            step.input_ids[tokens] = link.receive(torch.empty_like(tokens))
        else:
            return None
        return step.input_ids[tokens]

    def _room_for_taps(self, tokens: int) -> torch.Tensor:
        model = self.model
        shape = len(model.language_model.tapped), tokens, model.config.stream_size
        return torch.empty(shape, dtype=model.dtype, device=self.device)

    def _embed(
        self, batch: ModelWorkerBatch, step: ForwardBatch, inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the step's embeddings, with vision embeddings in place of its R pad tokens; the places of those; and
        their DeepStack embeddings [num_deepstack, R, hidden]. A later stage receives all of them from the one before,
        and what was tapped there."""
        before = self.model.comm.before
        if before is not None:
            return self._receive(before, step, inputs)
        embeds = self.model.embed_tokens(step.input_ids)
        for part in batch.input_embeds:
            embeds[part.token : part.token + len(part.embeds)] = to_device(part.embeds, self.device).to(embeds)
        if inputs.mm_index is None:
            return embeds, None, None
        index, inputs.mm_rows = inputs.mm_index.tensor, self._mm_embeds(batch.mm_embeds)
        # a smaller model's come behind the model's own
        own = inputs.mm_rows[:, : self.model.visual.row_width]
        parts = own.to(embeds.dtype).unflatten(1, (-1, embeds.shape[1])).transpose(0, 1)
        embeds = embeds.index_copy(0, index, parts[0])
        return embeds, index, parts[1:] if len(parts) > 1 else None

    def _receive(
        self, before: Link, step: ForwardBatch, inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Receive embeddings from the stage before, what was tapped so far, and the DeepStack embeddings of layers from
        here on."""
        model = self.model
        new = partial(torch.empty, dtype=model.dtype, device=self.device)
        embeds = before.receive(new((len(step.input_ids), model.config.stream_size)))
        if model.whole_config.ngrams is not None:
            before.receive(step.input_ids)  # all of them are known to the first stage alone
        tapped, _ = model.language_model.num_tapped
        if tapped:
            assert step.tapped is not None
            before.receive(step.tapped[:tapped])
        levels = model.visual.num_deepstack_layers - model.language_model.layers.first
        if inputs.mm_index is None or levels <= 0:
            return embeds, None, None
        index = inputs.mm_index.tensor
        return embeds, index, before.receive(new((levels, len(index), model.config.hidden_size)))

    def _send(self, behind: Link, step: ForwardBatch, hidden: torch.Tensor, deepstack: torch.Tensor | None) -> None:
        behind.send(hidden)
        if self.model.whole_config.ngrams is not None:
            behind.send(step.input_ids)
        _, tapped = self.model.language_model.num_tapped
        if tapped:
            assert step.tapped is not None
            behind.send(step.tapped[:tapped])
        levels = len(self.model.language_model.layers)
        if deepstack is not None and len(deepstack) > levels:
            behind.send(deepstack[levels:])

    def _mm_embeds(self, parts: Sequence[MMEmbeds]) -> torch.Tensor:
        rows = [to_device(part.embeds, self.device) for part in parts]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def _run(
        self,
        forward_batch: ForwardBatch,
        embeds: torch.Tensor,
        mm_index: torch.Tensor | None,
        deepstack: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the hidden states [N, hidden] of the step's tokens, and write their KV. Send them on if there is a
        next stage."""
        self.attn_backend.init_forward_metadata(forward_batch)
        hidden = self.model.forward(
            embeds,
            forward_batch.positions,
            forward_batch,
            deepstack_index=mm_index,
            deepstack_embeds=deepstack,
        )
        behind = self.model.comm.behind
        if behind is not None:
            self._send(behind, forward_batch, hidden, deepstack)
        return hidden

    @torch.inference_mode()
    def sample(
        self, forwarded: Forwarded, info: SamplingBatchInfo, logits: torch.Tensor | None = None
    ) -> PendingResult:
        """Sample the tokens of a step, which become the last ones of their requests. logits: float32 [S, vocab], if
        they are computed already. Raises as `device_errors` does, here or where the result is waited for."""
        with device_errors(f"sampling {len(info.batch_indices)} tokens of step {forwarded.step}"):
            began = self._transfers.mark()
            out = self._sample(forwarded, info, logits) if len(info.batch_indices) else None
            return LaunchedResult(forwarded, out, began, self._transfers)

    @torch.inference_mode()
    def take_part_in_sampling(self, forwarded: Forwarded, token_indices: np.ndarray) -> None:
        """Compute this process's part of the logits of tokens int64 [S] of a step. The process that samples brings all
        parts together."""
        [tokens] = self._transfers.upload([token_indices])
        self.model.compute_logits(forwarded.hidden.index_select(0, tokens))

    @torch.inference_mode()
    def recent_tokens(self, req_pool_indices: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """Return tokens int64 [S], on the device, of requests int64 [S] at places int64 [S] modulo `RECENT_TOKENS`."""
        rows, columns = self._transfers.upload([req_pool_indices, places])
        return self._recent[rows, columns]

    @torch.inference_mode()
    def remember(self, req_pool_indices: np.ndarray, places: np.ndarray, tokens: torch.Tensor) -> None:
        """Store tokens that another process sampled, at the places of `recent_tokens`."""
        rows, columns = self._transfers.upload([req_pool_indices, places])
        self._recent[rows, columns] = tokens

    def _sample(self, forwarded: Forwarded, info: SamplingBatchInfo, logits: torch.Tensor | None) -> SamplerOutput:
        upload = Upload(self._transfers)
        inputs = SamplerInputs(info, self.model.config.vocab_size, upload)
        hidden = forwarded.hidden
        some = upload.add(info.token_indices) if len(info.token_indices) < len(hidden) else None
        rows = forwarded.req_pool_indices[info.batch_indices]
        sampled = upload.add(rows), upload.add((forwarded.places[info.token_indices] + 1) % RECENT_TOKENS)
        unknown = None
        if len(info.in_flight_rows):
            unknown = upload.add(rows[info.in_flight_rows]), upload.add(info.in_flight_places % RECENT_TOKENS)
        upload.send()
        if logits is None:
            logits = self.model.compute_logits(hidden if some is None else hidden.index_select(0, some.tensor))
        out = sample(
            logits,
            info,
            inputs,
            processors=self._logits_processors,
            in_flight=None if unknown is None else self._recent[unknown[0].tensor, unknown[1].tensor],
        )
        self._recent[sampled[0].tensor, sampled[1].tensor] = out.next_token_ids
        return out


def _ends_kept(batch: ModelWorkerBatch) -> list[StateCopy]:
    """Return the copies, made once the step is computed, of states that are kept behind all tokens of a request."""
    lengths = batch.seq_lens - batch.prefix_lens
    return [
        StateCopy(source=int(batch.states[one.index]), target=one.target)
        for one in batch.state_snapshots
        if one.tokens == lengths[one.index]
    ]
