"""Uploads a step's message to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch

from vlmserve.executor.logprobs import prompt_tiles
from vlmserve.executor.model_worker_batch import RECENT_TOKENS, MMEmbeds, ModelWorkerBatch
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.transfers import Upload, Uploaded


class StepInputs:
    """Arrays of a step on their way to the device. `ForwardBatch` describes those of the same names.

    places: int64 [N] on the host, the place of each token in its request. sampled_last: where the last sampled tokens
    of these requests are. table_*: which entries of the request table are written, and with what: this step's, and
    those of new prefixes; window_table_slots: the same of layers with windows, None unless these have slots of their
    own. single_*, guessed: see `RecurrentStep`; a triple for each `GuessedTokens`. advances: the
    arrays of `RecurrentCache.advance`. drafts: if guesses are to be made. The rest is for entries of an EAGLE-3 head,
    if there is one. entry_positions: int64 [3, N]. last_places: int64 [B], of each request's last token before the
    step. given_tokens: those whose embeddings are given. draft_positions: int64 [3, N], in a smaller model that
    guesses. mm_tokens: int64 [R] on the host, with mm_rows [R, width], to be set: the vision embeddings.
    """

    mm_rows: torch.Tensor | None = None

    def __init__(self, batch: ModelWorkerBatch, model: VisionLanguageModel, upload: Upload) -> None:
        self.batch = batch
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
        self.window_cache_loc = self.window_table_slots = None
        if len(batch.window_cache_loc):
            windows = [*(prefix.window_slots for prefix in batch.prefix_slots), batch.window_cache_loc]
            self.window_cache_loc = add(batch.window_cache_loc)
            self.window_table_slots = add(np.concatenate(windows, dtype=np.int32))
        in_flight = bool((batch.input_ids < 0).any())
        self.sampled_last = (add(owners), add(self.places % RECENT_TOKENS)) if in_flight else None
        self.single_states = self.single_tokens = self.states = None
        self.guessed: list[tuple[Uploaded, Uploaded, Uploaded]] = []
        if len(batch.states):
            single = self.extend_lens == 1
            self.states = add(batch.states)
            for length in np.unique(self.extend_lens[batch.num_drafts > 0]).tolist() if len(batch.num_drafts) else ():
                own = np.flatnonzero((batch.num_drafts > 0) & (self.extend_lens == length))
                tokens = (ends[own] - length)[:, None] + np.arange(length)
                self.guessed.append((add(tokens), add(batch.states[own]), add(batch.req_pool_indices[own])))
            self.single_states = add(batch.states[single]) if single.any() else None
            self.single_tokens = add(ends[single] - 1) if single.any() and not single.all() else None
        jobs = batch.state_advances
        fields = [(job.source, job.row, job.tokens, job.target) for job in jobs]
        self.advances = [add(part) for part in np.array(fields, dtype=np.int64).T.copy()] if jobs else None
        self.drafts = DraftInputs(batch, upload) if guess_counts(batch) else None
        self.mm_tokens = _tokens(batch.mm_embeds)
        self.mm_index = add(self.mm_tokens) if batch.mm_embeds else None
        self.draft_positions = self.entry_positions = self.last_places = self.given_tokens = None
        if model.draft is not None:
            sees = isinstance(model.draft, VisionLanguageModel)
            self.draft_positions = self.positions if sees else add(np.tile(self.places, (3, 1)))
        eagle = model.eagle
        if eagle is not None:
            self.last_places = add(np.maximum(batch.prefix_lens - 1, 0))
            before = np.roll(batch.positions, 1, axis=1)
            before[:, ends - self.extend_lens] = batch.positions_before
            self.entry_positions = add(np.tile(self.places - 1, (3, 1)) if eagle.config.turns_by_place else before)
            given = (*batch.mm_embeds, *batch.input_embeds)
            self.given_tokens = add(_tokens(given)) if given else None
        self.hidden_tokens = add(batch.hidden_tokens) if len(batch.hidden_tokens) else None
        asked = batch.prompt_logprobs
        self.prompt_tiles = prompt_tiles(asked, model.config.vocab_size, upload) if asked is not None else []


class DraftInputs:
    """The guesses that a step has made, on their way to the device.

    order: int64 [n], with host_order on the host, the numbers of requests with guesses, those with most first. counts:
    how many of these have a first guess, a second one, and so on. prefix_lens: int32 [n], with host_lens on the host,
    tokens before the step. tokens: int64, the batch tokens that are guesses. given: int64, all first guesses, all
    second ones, and so on; -1 for those to be made.
    """

    def __init__(self, batch: ModelWorkerBatch, upload: Upload) -> None:
        order = np.argsort(-batch.num_drafts, kind="stable")[: np.count_nonzero(batch.num_drafts)]
        self.counts = guess_counts(batch)
        self.host_lens = batch.prefix_lens[order].tolist()
        self.host_order = order
        self.order, self.prefix_lens = upload.add(order), upload.add(batch.prefix_lens[order].astype(np.int32))
        self.tokens = upload.add(drafted(batch))
        firsts = (batch.seq_lens - batch.prefix_lens).cumsum()[order] - batch.num_drafts[order]
        self.given = upload.add(
            np.concatenate([batch.input_ids[firsts[:count] + number] for number, count in enumerate(self.counts)])
        )


def returned_states(hidden: torch.Tensor, tokens: torch.Tensor, batch: ModelWorkerBatch) -> torch.Tensor:
    """Return the hidden states float32 [H, hidden] that a step returns, out of those of all its tokens. tokens:
    `hidden_tokens` on the device."""
    if not len(batch.hidden_counts):
        return hidden[tokens].float()
    ends = batch.hidden_tokens + 1
    spans = zip((ends - batch.hidden_counts).tolist(), ends.tolist(), strict=True)
    return torch.stack([hidden[start:end].sum(0, dtype=torch.float32) for start, end in spans])


def guess_counts(batch: ModelWorkerBatch) -> list[int]:
    """Return how many requests of a step have a first guess, a second one, and so on; nothing if all are known."""
    if not len(batch.num_drafts) or (batch.input_ids[drafted(batch)] >= 0).all():
        return []
    return [int((batch.num_drafts > number).sum()) for number in range(batch.num_drafts.max())]


def guess_rounds(steps: Sequence[ModelWorkerBatch | None]) -> list[tuple[int, ...]]:
    """Return the `guess_counts` of each group's step side by side: those of first guesses, of second ones, and so on.
    None is a group without a step."""
    return [*zip_longest(*([] if step is None else guess_counts(step) for step in steps), fillvalue=0)]


def drafted(batch: ModelWorkerBatch) -> np.ndarray:
    """Return the batch tokens int64 that are guesses, given a step with any."""
    left = np.repeat((batch.seq_lens - batch.prefix_lens).cumsum(), batch.num_drafts)
    return left - np.concatenate([np.arange(count, 0, -1) for count in batch.num_drafts.tolist()])


def places_of(batch: ModelWorkerBatch) -> np.ndarray:
    """Return the place, int64 [N], of each token of a step in its request."""
    lengths = batch.seq_lens - batch.prefix_lens
    before = lengths.cumsum() - lengths
    return np.arange(len(batch.input_ids)) + np.repeat(batch.prefix_lens - before, lengths)


def _tokens(parts: tuple[MMEmbeds, ...]) -> np.ndarray:
    spans = [np.arange(part.token, part.token + len(part.embeds)) for part in parts]
    return np.concatenate([np.zeros(0, dtype=np.int64), *spans])
