"""The requests that decode, and the steps that are made of requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vlmserve.executor.model_worker_batch import MMEmbeds, ModelWorkerBatch, PrefixSlots, SamplingBatchInfo
from vlmserve.models.attention.base import ForwardMode
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.sampling_info import SamplingArrays, prompt_rows


class ScheduledReq(NamedTuple):
    """A request's part of a step: its tokens [start, end).

    completes: all tokens up to the ones to be sampled are in it. output_index: of the first token that is sampled; None
    if none is, because the prompt goes on, or no answer is wanted. drafts: its last tokens, if they are guesses, -1 for
    those that the worker makes; one more token is sampled than there are drafts. scored: prompt positions [first, last)
    whose logprobs are wanted. hidden: the sum of the hidden states of so many of its last tokens is returned.
    """

    req: Req
    start: int
    end: int
    output_index: int | None
    completes: bool = True
    drafts: tuple[int, ...] = ()
    scored: tuple[int, int] = (0, 0)
    hidden: int = 0

    @property
    def tokens_sampled(self) -> int:
        """Return how many tokens the worker samples."""
        return 0 if self.output_index is None else 1 + len(self.drafts)


class RunningBatch:
    """The requests that decode, oldest first. sampling: how they are sampled, see `ScheduleBatch`."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._reqs: list[Req] = []
        self.sampling = SamplingArrays()

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def reqs(self) -> list[Req]:
        """Return all of them."""
        return self._reqs.copy()

    @property
    def decodable(self) -> list[Req]:
        """Return the requests that get another token, as far as is known now: a token in flight may end an answer.
        Requests with drafts in flight wait for them."""
        return [
            req for req in self._reqs if len(req.output_ids) + req.in_flight < req.max_new_tokens and not req.drafts
        ]

    def merge(self, req: Req) -> None:
        """Add a request whose prompt is scheduled to its end."""
        self._reqs.append(req)

    def remove(self, req: Req) -> None:
        """Remove a request that has finished, or gives its place up."""
        self._reqs.remove(req)

    def check_decode_mem(self, reqs: Sequence[Req]) -> bool:
        """Return True if there are slots for a step of these requests, free or by eviction."""
        room, windows = self._kv.allocator.available_size(), self._kv.windows
        if windows is not None:
            room = min(room, windows.available_size())
        if len(reqs) * self._kv.page_size <= room:
            return True
        needed = sum(self._kv.allocator.tokens_needed(req.kv_len, req.fill_len) for req in reqs)
        return needed <= self._kv.reachable() and (windows is None or needed <= windows.available_size())

    def retract_decode(self) -> Req:
        """Remove and return the request with the least output, the newest among equals."""
        victim = min(self._reqs, key=lambda req: (len(req.output_ids), -req.arrival))
        self.remove(victim)
        return victim


class ScheduleBatch:
    """One step. Slots are allocated before it is made, by `PrefillAdder` and `KVCacheManager.extend_by_one`. Making it
    advances the lengths of its requests as if it had been computed.

    allowed_s: the seconds that its prompts may take, see `StepCosts`. sampling: kept from step to step by the caller.
    guesses: it was decided when guessing paid. samples_late: the next tokens depend on tokens in flight, so sampling
    waits for these.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        mode: ForwardMode,
        prompts: Sequence[Req],
        decoding: Sequence[Req],
        sampling: SamplingArrays,
        *,
        allowed_s: float = math.inf,
        guesses: bool = False,
    ) -> None:
        self.kv = kv
        self.guesses = guesses
        self.allowed_s = allowed_s
        self._sampling = sampling if decoding else SamplingArrays()  # a prompt step would only push out those kept
        self.forward_mode = mode
        self.prompt_tokens = sum(req.kv_allocated_len - req.kv_len for req in prompts)
        self.reqs = tuple(self._advance(req) for req in (*prompts, *decoding))
        self.num_tokens = self.prompt_tokens + len(decoding) + sum(len(req.drafts) for req in decoding)
        self.prompts = self.reqs[: len(prompts)]
        self.decoding = self.reqs[len(prompts) :]
        self.samples_late = any(
            part.req.samples_by_history and part.output_index != len(part.req.output_ids)
            for part in self.reqs
            if part.output_index is not None
        )

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def _has_drafts(self) -> bool:
        return self.num_tokens > self.prompt_tokens + len(self.decoding)

    @staticmethod
    def _advance(req: Req) -> ScheduledReq:
        start, end = req.kv_len, req.kv_allocated_len
        req.kv_len = end
        scored = req.prompt_scores.wanted(start, end) if req.prompt_scores is not None else (0, 0)
        hidden = 0 if req.pooled is None else req.pooled.wanted(start, end)
        output_index = len(req.output_ids) + req.in_flight
        if end < req.prompt_len + output_index:
            return ScheduledReq(req, start, end, None, completes=False, scored=scored, hidden=hidden)
        returns = req.returns.hidden_states
        hidden = hidden or int(returns == "all" or (returns == "last" and not output_index))
        if output_index >= req.max_new_tokens:
            return ScheduledReq(req, start, end, None, scored=scored, hidden=hidden)
        req.in_flight += 1 + len(req.drafts)
        return ScheduledReq(req, start, end, output_index, drafts=req.drafts, scored=scored, hidden=hidden)

    def sampling_info(self) -> SamplingBatchInfo:
        """Return how its tokens are sampled, by all that is known now."""
        rows = [(at, part, part.output_index) for at, part in enumerate(self.reqs) if part.output_index is not None]
        lasts = np.cumsum([part.end - part.start for part in self.reqs]) - 1
        behind = lasts[[at for at, _, _ in rows]]
        if self._has_drafts:
            rows = [(at, part, index + k) for at, part, index in rows for k in range(1 + len(part.drafts))]
            behind = np.array([lasts[at] - part.tokens_sampled + 1 + i - part.output_index for at, part, i in rows])
        return self._sampling.info(
            [at for at, _, _ in rows], behind, [part.req for _, part, _ in rows], [index for _, _, index in rows]
        )

    def get_model_worker_batch(self, step: int) -> ModelWorkerBatch:
        """Return the step as a message; arrays are fresh copies."""
        rows = np.array([part.req.req_pool_idx for part in self.reqs], dtype=np.int64)
        starts = np.array([part.start for part in self.reqs], dtype=np.int64)
        ends = np.array([part.end for part in self.reqs], dtype=np.int64)
        # many requests have one token each, and few have more
        single = len(self.prompts) if (ends - starts == 1)[len(self.prompts) :].all() else len(self.reqs)
        spans = [(part.req, part.start, part.end) for part in self.reqs[:single]]
        ones = self.reqs[single:]
        places = starts[single:]
        moved = places + _ints([part.req.position_delta for part in ones])
        slots = np.concatenate(
            [*(self.kv.slots(*span) for span in spans), self.kv.req_pool.slots_at(rows[single:], places)]
        )
        windows = self.kv.windows
        return ModelWorkerBatch(
            step=step,
            forward_mode=int(self.forward_mode),
            req_pool_indices=rows,
            input_ids=np.concatenate(
                [*(req.fill_ids(a, b) for req, a, b in spans), _ints([part.req.token_at(part.start) for part in ones])]
            ),
            positions=np.concatenate(
                [
                    *(req.positions(a, b) for req, a, b in spans),
                    np.broadcast_to(moved, (3, len(ones))),
                ],
                axis=1,
            ),
            positions_before=np.concatenate(
                [
                    *(req.positions(max(a - 1, 0), max(a, 1)) for req, a, _ in spans),
                    np.broadcast_to(moved - 1, (3, len(ones))),
                ],
                axis=1,
            ),
            seq_lens=ends,
            prefix_lens=starts,
            out_cache_loc=slots,
            window_cache_loc=slots[:0] if windows is None else windows.slots(slots),
            prefix_slots=self._unsent_prefixes(),
            **_embeds(spans),
            **self._returned(ends - starts),
            num_drafts=_ints([len(part.drafts) for part in self.reqs] if self._has_drafts else []),
            **self._states(),
            kv_copies=self.kv.prefix_cache.take_copy_jobs(),
            adapters=self._adapters(),
        )

    def _adapters(self) -> tuple[str, ...]:
        adapters = [part.req.adapter for part in self.reqs]
        return tuple("" if one is None else one.digest for one in adapters) if any(adapters) else ()

    def _states(self) -> dict[str, Any]:
        states = self.kv.states
        if states is None:
            return {}
        # guesses are in no state before they are known to be right
        computed = [(part.req, part.start, part.start if part.drafts else part.end) for part in self.reqs]
        return {
            "states": np.array([part.req.state for part in self.reqs], dtype=np.int64),
            "state_copies": states.take_copies(),
            "state_advances": states.advances(computed, self.kv.slot),
            "state_snapshots": states.snapshots(computed, self.kv.slot),
        }

    def _returned(self, lengths: np.ndarray) -> dict[str, Any]:
        """Return what the worker sends back besides tokens. lengths: int64 [B], tokens of each request."""
        if not any(part.hidden or part.scored[1] > part.scored[0] for part in self.reqs):
            return {}
        lasts = lengths.cumsum() - 1
        firsts = (lasts + 1 - lengths).tolist()
        scored = [(part, at) for part, at in zip(self.reqs, firsts, strict=True)]
        hidden = _ints([part.hidden for part in self.reqs])
        counts = hidden[hidden > 0]
        return {
            # position p of a prompt follows token p - 1
            "prompt_logprobs": prompt_rows(
                [(part.req, *part.scored, at + part.scored[0] - 1 - part.start) for part, at in scored]
            ),
            "hidden_tokens": lasts[hidden > 0],
            "hidden_counts": counts if (counts > 1).any() else counts[:0],
        }

    def _unsent_prefixes(self) -> tuple[PrefixSlots, ...]:
        found = []
        for part in self.reqs:
            if part.req.prefix_unsent:
                part.req.prefix_unsent = False
                if part.start:
                    assert part.req.req_pool_idx is not None
                    slots, windows = self.kv.slots(part.req, 0, part.start), self.kv.windows
                    own = slots[:0] if windows is None else windows.slots(slots)
                    found.append(PrefixSlots(req_pool_idx=part.req.req_pool_idx, slots=slots, window_slots=own))
        return tuple(found)


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _embeds(spans: Iterable[tuple[Req, int, int]]) -> dict[str, Any]:
    """Return the part of the message for tokens [start, end) of requests that take embeddings."""
    vision, given, at = list[MMEmbeds](), list[MMEmbeds](), 0
    for req, start, end in spans:
        vision += req.media.embeds(start, end, at=at)
        if req.input_embeds is not None and start < req.prompt_len:
            rows = torch.from_numpy(np.array(req.input_embeds.rows[start:end]))
            given.append(MMEmbeds(token=at, embeds=rows))
        at += end - start
    return {"mm_embeds": tuple(vision), "input_embeds": tuple(given)}
