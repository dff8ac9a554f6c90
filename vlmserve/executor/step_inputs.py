"""Uploads a step's message to the device in one copy."""

from __future__ import annotations

import numpy as np

from vlmserve.executor.logprobs import prompt_tiles
from vlmserve.executor.model_worker_batch import RECENT_TOKENS, MMEmbeds, ModelWorkerBatch
from vlmserve_common.compute.transfers import Upload


class StepInputs:
    """Arrays of a step on their way to the device. `ForwardBatch` describes those of the same names.

    places: int64 [N] on the host, the place of each token in its request. sampled_last: where the last sampled tokens
    of these requests are. table_*: which entries of the request table are written, and with what: this step's, and
    those of new prefixes. single_*: see `RecurrentStep`.
    """

    def __init__(self, batch: ModelWorkerBatch, vocab: int, upload: Upload) -> None:
        self.extend_lens = batch.seq_lens - batch.prefix_lens
        ends = self.extend_lens.cumsum()
        owners = np.repeat(batch.req_pool_indices, self.extend_lens)
        self.places = places_of(batch)

        add = upload.add
        self.input_ids, self.positions = add(batch.input_ids), add(batch.positions)
        self.req_pool_indices, self.out_cache_loc = add(batch.req_pool_indices), add(batch.out_cache_loc)
        self.seq_lens = add(batch.seq_lens.astype(np.int32))
        self.extend_start_loc = add(np.concatenate(([0], ends), dtype=np.int32))
        self.table_host = owners, self.places
        slots = batch.out_cache_loc
        if batch.prefix_slots:
            known = [prefix.slots for prefix in batch.prefix_slots]
            rows = np.repeat([prefix.req_pool_idx for prefix in batch.prefix_slots], [len(one) for one in known])
            places = np.concatenate([np.arange(len(one)) for one in known])
            self.table_host = np.concatenate([rows, owners]), np.concatenate([places, self.places])
            slots = np.concatenate([*known, slots])
        self.table_rows, self.table_places = (add(part) for part in self.table_host)
        self.table_slots = add(slots.astype(np.int32))
        in_flight = bool((batch.input_ids < 0).any())
        self.sampled_last = (add(owners), add(self.places % RECENT_TOKENS)) if in_flight else None
        self.single_states = self.single_tokens = None
        if len(batch.states):
            single = self.extend_lens == 1
            self.single_states = add(batch.states[single]) if single.any() else None
            self.single_tokens = add(ends[single] - 1) if single.any() and not single.all() else None
        self.mm_index = add(_tokens(batch.mm_embeds)) if batch.mm_embeds else None
        self.hidden_tokens = add(batch.hidden_tokens) if len(batch.hidden_tokens) else None
        asked = batch.prompt_logprobs
        self.prompt_tiles = prompt_tiles(asked, vocab, upload) if asked is not None else []


def places_of(batch: ModelWorkerBatch) -> np.ndarray:
    """Return the place, int64 [N], of each token of a step in its request."""
    lengths = batch.seq_lens - batch.prefix_lens
    before = lengths.cumsum() - lengths
    return np.arange(len(batch.input_ids)) + np.repeat(batch.prefix_lens - before, lengths)


def _tokens(parts: tuple[MMEmbeds, ...]) -> np.ndarray:
    return np.concatenate([np.arange(part.token, part.token + len(part.embeds)) for part in parts])
