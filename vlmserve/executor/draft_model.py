"""Guesses tokens with a smaller model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmserve.executor.drafters import Drafter, agreed, one_token_each
from vlmserve.executor.step_inputs import StepInputs
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.vlm import LanguageModel, VisionLanguageModel
from vlmserve_common.compute.transfers import Transfers, Upload

_MOST_CAUGHT_UP = 4096
"""Tokens that the smaller model catches up with in a step: more would keep other requests waiting."""


class DraftModelDrafter(Drafter):
    """The smaller model has the same tokens as the model, and its KV lies in the same slots, in layers of the cache
    behind the model's. So cached prefixes have it, too.

    It computes prompts along with the model. It does not compute tokens that are decoded without guesses: when guesses
    are made again, it first catches up. So what it has of a request is a number of first tokens, and for each slot it
    is known whether it has written there. That is all on the host, so that nothing waits for a GPU.

    A model with a tower sees pictures as its own tower encodes them. Another one sees their pad tokens, and turns by
    places of tokens. transfers: to and from the device.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        draft: LanguageModel,
        backend: AttentionBackend,
        kv_cache: KVCache,
        pool: ReqToTokenPool,
        transfers: Transfers,
    ) -> None:
        super().__init__(model)
        self._draft, self._backend, self._transfers = draft, backend, transfers
        self._cache = kv_cache.behind(model.config.num_kv_layers + model.config.num_index_layers)
        self._sees = isinstance(draft, VisionLanguageModel)
        slots, device = len(self._cache.layers[0].keys), self._cache.layers[0].keys.device
        self._ids = torch.zeros(slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros((3, slots), dtype=torch.int64, device=device)
        self._written = np.zeros(slots, dtype=bool)
        self._slots = np.zeros((pool.size, pool.max_context_len), dtype=np.int64)
        self._done = np.zeros(pool.size, dtype=np.int64)  # first tokens of each request that it has computed

    def begin(self, step: ForwardBatch, inputs: StepInputs) -> None:
        """See `Drafter`."""
        batch = inputs.batch
        for job in batch.kv_copies:
            if job.direction == "to_device" and job.device_slots is not None:
                self._written[job.device_slots] = True  # as nearly all was that went to the host
            elif job.to_slots is not None and job.device_slots is not None:
                self._written[job.to_slots] = self._written[job.device_slots]
                for known in (self._ids, self._positions):
                    known[..., job.to_slots] = known[..., job.device_slots]
        self._written[batch.out_cache_loc] = False
        for prefix in batch.prefix_slots:
            self._slots[prefix.req_pool_idx, : len(prefix.slots)] = prefix.slots
            missing = np.flatnonzero(~self._written[prefix.slots])
            self._done[prefix.req_pool_idx] = missing[0] if len(missing) else len(prefix.slots)
        rows = batch.req_pool_indices
        self._slots[np.repeat(rows, inputs.extend_lens), inputs.places] = batch.out_cache_loc
        self._done[rows] = np.minimum(self._done[rows], batch.prefix_lens)
        self._note(step, inputs)

    def _note(self, step: ForwardBatch, inputs: StepInputs) -> None:
        self._ids[step.out_cache_loc] = step.input_ids
        assert inputs.draft_positions is not None
        self._positions[:, step.out_cache_loc] = inputs.draft_positions.tensor

    def draft(self, step: ForwardBatch, inputs: StepInputs, rounds: Sequence[Sequence[int]]) -> None:
        """See `Drafter`. The KV of a guess that is right stays; that of the last guess is missing."""
        drafts, message = inputs.drafts, inputs.batch
        assert drafts is not None
        rows, known = message.req_pool_indices[drafts.host_order], message.prefix_lens[drafts.host_order] + 1
        first = self._done[rows]
        ends = np.minimum(known, first + max(1, _MOST_CAUGHT_UP // len(rows)))
        hidden = self._compute(step, rows, first, ends)
        guessed = message.num_drafts[drafts.host_order] - 1  # besides the last one
        self._has(rows, np.where(ends == known, known + guessed, ends))

        order = drafts.order.tensor
        starts, given = step.extend_start_loc[order], drafts.given.tensor.split(drafts.counts)
        ids, slots = step.input_ids[starts], step.out_cache_loc[starts]
        rows_here, positions = step.req_pool_indices[order], self._positions[:, slots]
        for number, count in enumerate(drafts.counts):
            if number:
                batch = one_token_each(
                    step,
                    ids[:count],
                    positions[:, :count] + number,
                    rows=rows_here[:count],
                    slots=step.out_cache_loc[starts[:count] + number],
                    before=drafts.prefix_lens.tensor[:count] + number,
                    host_before=[length + number for length in drafts.host_lens[:count]],
                    kv_cache=self._cache,
                    attn_backend=self._backend,
                )
                hidden = self._forward(batch)
            logits = self._draft.compute_logits(hidden)[:, : self._model.config.vocab_size].contiguous()
            ids = torch.where(given[number] < 0, agreed(logits, self._model.comm.attention), given[number])
            step.input_ids[starts[:count] + number + 1] = ids
        self._note(step, inputs)

    def extend(self, step: ForwardBatch, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Compute the prompts of a step, and what is missing before them."""
        batch = inputs.batch
        chunks = inputs.extend_lens > 1
        if len(batch.num_drafts):
            chunks &= batch.num_drafts == 0
        if not chunks.any():
            return
        rows, ends = batch.req_pool_indices[chunks], batch.seq_lens[chunks]
        first = self._done[rows]
        pictures = None
        if inputs.mm_rows is not None and self._sees:
            # where this step's tokens are among those computed here
            lens, places = ends - first, np.full(len(inputs.places), -1)
            within = np.repeat(chunks, inputs.extend_lens)
            shift = (lens.cumsum() - ends) - (inputs.extend_lens.cumsum() - batch.seq_lens)[chunks]
            places[within] = np.repeat(shift, inputs.extend_lens[chunks]) + np.flatnonzero(within)
            rows_of = inputs.mm_rows[:, self._model.visual.row_width :]
            found = places[inputs.mm_tokens] >= 0
            if not found.all():  # a chunk of one token is not computed
                rows_of = rows_of[torch.from_numpy(found).to(rows_of.device)]
            pictures = places[inputs.mm_tokens[found]], rows_of
        self._compute(step, rows, first, ends, pictures)
        self._has(rows, ends)

    def _has(self, rows: np.ndarray, ends: np.ndarray) -> None:
        for row, first, end in zip(rows.tolist(), self._done[rows].tolist(), ends.tolist(), strict=True):
            self._written[self._slots[row, first:end]] = True
        self._done[rows] = ends

    def _compute(
        self,
        step: ForwardBatch,
        rows: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        pictures: tuple[np.ndarray, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute tokens [starts, ends) of requests `rows` (int64 [n] each), and return the last hidden state of each,
        [n, hidden]. pictures: places among these tokens, and what the tower made for them."""
        lens = ends - starts
        upload = Upload(self._transfers)
        slots = upload.add(
            np.concatenate([self._slots[row, a:b] for row, a, b in zip(rows, starts, ends, strict=True)])
        )
        own_rows, seq_lens = upload.add(rows), upload.add(ends.astype(np.int32))
        start_loc = upload.add(np.concatenate(([0], lens.cumsum()), dtype=np.int32))
        index = upload.add(pictures[0]) if pictures is not None else None
        upload.send()
        hidden = self._forward(
            ForwardBatch(
                forward_mode=ForwardMode.DECODE if (lens == 1).all() else ForwardMode.EXTEND,
                input_ids=self._ids[slots.tensor],
                positions=self._positions[:, slots.tensor],
                req_pool_indices=own_rows.tensor,
                seq_lens=seq_lens.tensor,
                extend_start_loc=start_loc.tensor,
                prefix_lens=starts.tolist(),
                extend_lens=lens.tolist(),
                out_cache_loc=slots.tensor,
                req_to_token_pool=step.req_to_token_pool,
                kv_cache=self._cache,
                attn_backend=self._backend,
            ),
            index.tensor if index is not None else None,
            pictures[1] if pictures is not None else None,
        )
        return hidden[start_loc.tensor[1:].long() - 1]

    def _forward(
        self, batch: ForwardBatch, index: torch.Tensor | None = None, pictures: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._backend.init_forward_metadata(batch)
        # ids that only the larger model has stand for no token
        x = self._draft.embed_tokens(batch.input_ids.clamp(0, self._draft.config.vocab_size - 1))
        deepstack = None
        if index is not None and pictures is not None:
            parts = pictures.to(x.dtype).view(len(pictures), -1, x.shape[1]).transpose(0, 1)
            x, deepstack = x.index_copy(0, index, parts[0]), parts[1:] if len(parts) > 1 else None
        return self._draft(x, batch.positions, batch, deepstack_index=index, deepstack_embeds=deepstack)
