"""Admission of prompt chunks to a step, under budgets."""

from __future__ import annotations

import enum

from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req

CLIP_MAX_NEW_TOKENS = 4096
MIN_TEXT_CHUNK = 256
"""Fewer tokens than these, without a picture's embedding among them, are not worth a step before it is ready."""


class AddReqResult(enum.Enum):
    """Why adding went on or stopped."""

    CONTINUE = enum.auto()
    NOT_READY = enum.auto()  # the next tokens need embeddings that are not there yet; others may go on
    NO_TOKEN = enum.auto()  # KV slots or places in the request pool are short
    OTHER = enum.auto()  # the step's own budgets are used up


class PrefillAdder:
    """Collects the prompt chunks of one step.

    Budgets, in tokens: KV slots (free or evictable, less what running requests are expected to need: their remaining
    output, clipped, times new_token_ratio), prompt tokens a step (max_prefill_tokens) and chunk tokens a step
    (chunk_size; 0 or less leaves prompts whole, but for those whose pictures come bit by bit). A chunk ends before the
    first embedding that is not ready.

    can_run: the requests of the step. unfinished: those of them whose prompt goes on after it. full: a chunk was cut
    by a budget, so nothing more fits.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        running: list[Req],
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunk_size: int,
        mixed_decode_tokens: int = 0,
    ) -> None:
        self.kv = kv
        self.can_run: list[Req] = []
        self.unfinished: list[Req] = []
        self.full = False
        self._nothing_runs = not running
        self._reserved = sum(
            min(req.remaining_new_tokens, CLIP_MAX_NEW_TOKENS) * new_token_ratio for req in running
        ) + kv.page_size * len(running)
        # decoding takes part of a mixed step, but a prompt in progress always gets on
        self._rem_input = max(max_prefill_tokens - mixed_decode_tokens, kv.page_size)
        self._rem_chunk = None if chunk_size <= 0 else max(chunk_size - mixed_decode_tokens, kv.page_size)

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """The next chunk of a request begun earlier."""
        ready = self._ready_part(req)
        if ready == 0:
            return AddReqResult.NOT_READY
        length = self._chunk_of(req, ready)
        if length == 0:
            return AddReqResult.OTHER
        if not self.kv.extend(req, length):
            return AddReqResult.NO_TOKEN
        self._take(req, length)
        return AddReqResult.CONTINUE

    def add_one_req(self, req: Req) -> AddReqResult:
        """Try to admit a waiting request, not in the pool yet; then it is in `can_run`, with slots for its chunk."""
        if self._rem_input <= 0 or (self._rem_chunk is not None and self._rem_chunk <= 0):
            return AddReqResult.OTHER
        if self._waits_for_embeds(req, start=0):
            return AddReqResult.NOT_READY  # so much is known without a look at the prefix cache
        if not self.kv.start(req):
            return AddReqResult.NO_TOKEN
        req.media.hold_from(req.kv_len)
        result = self._admit(req)
        if result is not AddReqResult.CONTINUE:
            self.kv.cancel_start(req)
        return result

    def _admit(self, req: Req) -> AddReqResult:
        ready = self._ready_part(req)
        if ready == 0:
            return AddReqResult.NOT_READY
        extend = req.fill_len - req.kv_len
        alone = self._nothing_runs and not self.can_run
        expected = extend + min(req.remaining_new_tokens, CLIP_MAX_NEW_TOKENS) + self.kv.page_size
        # alone, everything unlocked can be evicted for it, and longer requests than the pool were refused on arrival
        if not alone and expected > self.kv.reachable() - self._reserved:
            return AddReqResult.NO_TOKEN
        length = self._chunk_of(req, ready)
        if length == 0:
            return AddReqResult.OTHER
        if not self.kv.extend(req, length):
            return AddReqResult.NO_TOKEN
        self._reserved += expected - length
        self._take(req, length)
        return AddReqResult.CONTINUE

    def _ready_part(self, req: Req) -> int:
        """How many tokens could be computed now, for all that their embeddings say; 0 where it is better to wait."""
        until = req.media.ready_until()
        if until is None:
            return req.fill_len - req.kv_len
        if self._waits_for_embeds(req, start=req.kv_len):
            return 0
        return self._whole_pages(req, until - req.kv_len) or until - req.kv_len

    @staticmethod
    def _waits_for_embeds(req: Req, start: int) -> bool:
        """Whether a request that is computed up to `start` had better wait for its next embeddings."""
        until = req.media.ready_until()
        return until is not None and until - start < MIN_TEXT_CHUNK and not req.media.needs_embeds_before(until)

    def _chunk_of(self, req: Req, ready: int) -> int:
        """How many of the `ready` tokens to compute this step: all, a chunk that ends on a page boundary (so that it
        can be shared at once), or 0 to leave them to a later step."""
        limit = self._rem_input if self._rem_chunk is None else min(self._rem_chunk, self._rem_input)
        if ready <= limit:
            return ready
        if self._rem_chunk is None:
            return 0 if self.can_run else ready
        self.full = True
        # a chunk smaller than a page only where it is all that the settings allow
        return self._whole_pages(req, limit) or (0 if self.can_run else limit)

    def _whole_pages(self, req: Req, length: int) -> int:
        """The most of the next `length` tokens that end on a page boundary."""
        size = self.kv.page_size
        return max(0, (req.kv_len + length) // size * size - req.kv_len)

    def _take(self, req: Req, length: int) -> None:
        req.times.prefill_began()
        self.can_run.append(req)
        if not req.completes:
            self.unfinished.append(req)
        self._rem_input -= length
        if self._rem_chunk is not None:
            self._rem_chunk -= length
