"""Admission of prompt chunks to a step, under budgets."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req

CLIP_MAX_NEW_TOKENS = 4096
MIN_TEXT_CHUNK = 256
"""Text before a picture that is not ready: fewer tokens than these wait for the picture with the rest."""


_MOST_PASSES = 64
"""Steps after which nobody passes a request that waits for room for its adapter."""


class AddReqResult(enum.Enum):
    """Why a request is in the step, or is not."""

    CONTINUE = enum.auto()  # it is in the step, and more requests may follow
    NOT_READY = enum.auto()  # its next tokens need embeddings that are not there yet; other requests may follow
    NO_TOKEN = enum.auto()  # KV slots are short
    NO_ROW = enum.auto()  # all places for running requests are taken
    DRAIN = enum.auto()  # a running request gives its place up for it, once the steps in flight have come
    OTHER = enum.auto()  # the step's own budgets are used up


class PrefillAdder:
    """Collects the prompt chunks of one step.

    There are three budgets, in tokens:

    - KV slots that are free or evictable, less those that admitted requests are expected to take: the rest of their
      prompts, and the rest of their output, clipped, times new_token_ratio. Requests that ignore the end token use all
      of their output; for them it is checked that slots last until each of them has ended.
    - prompt tokens of a step (max_prefill_tokens).
    - tokens of a chunk (chunk_size; 0 or less leaves prompts whole, unless their pictures come bit by bit). The last
      chunk of a prompt may have `stretch` tokens more.

    A chunk ends before the first embedding that is not ready.

    There may be max_adapters LoRA adapters among all admitted requests.

    running: requests that decode. in_progress: requests whose prompts were begun. max_running: the most of both.
    can_run: the requests of the step. full: a budget has cut a chunk, so nothing more fits.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        running: Sequence[Req],
        in_progress: Sequence[Req],
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunk_size: int,
        max_running: int,
        stretch: int = 0,
        mixed_decode_tokens: int = 0,
        max_adapters: int = 1,
    ) -> None:
        self.kv = kv
        self._max_adapters = max_adapters
        self.can_run: list[Req] = []
        self.full = False
        self._admitted = [*running, *in_progress]
        self._ratio = new_token_ratio
        self._max_running = max_running
        self._stretch = stretch
        self._reserved: float | None = None  # computed when the first request is tried
        # decoding takes part of a mixed step, but a prompt in progress always gets on
        self._rem_input = max(max_prefill_tokens - mixed_decode_tokens, kv.page_size)
        self._rem_chunk = None if chunk_size <= 0 else max(chunk_size - mixed_decode_tokens, kv.page_size)

    def _reserve(self) -> float:
        """Return how many slots the admitted requests are expected to take from now on."""
        prompts, outputs = 0, 0
        for req in self._admitted:  # `extend_len` and `remaining_new_tokens`, for hundreds in every step
            made = len(req.output_ids) + req.in_flight
            prompts += req.prompt_len + made - req.kv_allocated_len
            outputs += min(req.max_new_tokens - made, CLIP_MAX_NEW_TOKENS)
        return prompts + outputs * self._ratio + len(self._admitted) * self.kv.page_size

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """Add the next chunk of a request that is in the pool."""
        ready = self._ready_part(req)
        if ready == 0:
            return AddReqResult.NOT_READY
        length = self._chunk_of(req, ready)
        if length == 0:
            return AddReqResult.OTHER
        if not self.kv.extend(req, length):
            return AddReqResult.NO_TOKEN
        self.can_run.append(req)
        self._rem_input -= length
        if self._rem_chunk is not None:
            self._rem_chunk -= length
        return AddReqResult.CONTINUE

    @classmethod
    def is_ready(cls, req: Req) -> bool:
        """Return True if a waiting request might be admitted, as far as is known without the prefix cache."""
        return not cls._waits_for_embeds(req, start=0)

    def add_one_req(self, req: Req, *, remote: bool = False) -> AddReqResult:
        """Try to admit a waiting request, not in the pool yet; then it is in `can_run`, with slots for its chunk.

        remote: its prompt is computed elsewhere. Then it is not in `can_run`, and has slots for all tokens but the last
        one, unless these are cached already.
        """
        if self._rem_input <= 0 or (self._rem_chunk is not None and self._rem_chunk <= 0):
            return AddReqResult.OTHER
        if req.adapter is not None and not self._has_place(req):
            req.adapter_waits += 1
            # those behind it may pass, but not for ever
            return AddReqResult.NOT_READY if req.adapter_waits < _MOST_PASSES else AddReqResult.OTHER
        match = self.kv.start(req) if len(self._admitted) < self._max_running else None
        if match is None:
            return AddReqResult.NO_ROW
        # alone, everything unlocked can be evicted for it, and longer requests than the pool were refused on arrival
        if self._reserved is None:
            self._reserved = self._reserve()
        result = AddReqResult.NO_TOKEN
        if not self._admitted or self._fits(req):
            self.kv.load_back(req, match)
            missing = req.fill_len - 1 - req.kv_len
            if remote and missing > 0:
                result = AddReqResult.CONTINUE if self.kv.extend(req, missing) else AddReqResult.NO_TOKEN
            else:
                req.media.hold_from(req.kv_len)
                result = self.add_chunked_req(req)
        if result is not AddReqResult.CONTINUE:
            self.kv.cancel_start(req)
            return result
        self._admitted.append(req)
        # `reachable` is less by the slots of its chunk now
        self._reserved += self._expected(req) - (req.kv_allocated_len - req.kv_len)
        return result

    def _has_place(self, req: Req) -> bool:
        """Whether a request's adapter may join those of admitted requests."""
        adapters = {other.adapter.digest for other in self._admitted if other.adapter is not None}
        return req.adapter is None or req.adapter.digest in adapters or len(adapters) < self._max_adapters

    def _expected(self, req: Req) -> int:
        """Return how many slots a request takes in all, from its cached prefix on."""
        return req.extend_len + min(req.remaining_new_tokens, CLIP_MAX_NEW_TOKENS) + self.kv.page_size

    def _fits(self, req: Req) -> bool:
        if req.sampling_params.ignore_eos:
            return self._lasts(req)
        assert self._reserved is not None
        return self._expected(req) <= self.kv.reachable() - self._reserved

    def _lasts(self, newcomer: Req) -> bool:
        """Return True if slots last until each request has ended. All requests grow by a token a step, and give their
        slots back at the end. The ratio says when requests end that may end early."""
        ends = []
        for req in (*self._admitted, newcomer):
            certain = req.sampling_params.ignore_eos or req is newcomer
            ends.append((req.remaining_new_tokens * (1.0 if certain else self._ratio), req))
        ends.sort(key=lambda end: end[0])
        free: float = (
            self.kv.reachable()
            - sum(req.fill_len - req.kv_allocated_len for _, req in ends)
            - self.kv.page_size * len(ends)
        )
        done = 0.0
        for place, (left, req) in enumerate(ends):
            free -= (left - done) * (len(ends) - place)
            if free < 0:
                return False
            done = left
            free += req.fill_len - req.protected_len + left
        return True

    def _ready_part(self, req: Req) -> int:
        """Return how many tokens have their embeddings; 0 if it is better to wait for more."""
        until = req.media.ready_until(req.kv_len)
        if until is None:
            return req.extend_len
        if self._waits_for_embeds(req, start=req.kv_len):
            return 0
        return self._whole_pages(req, until - req.kv_len) or until - req.kv_len

    @staticmethod
    def _waits_for_embeds(req: Req, start: int) -> bool:
        until = req.media.ready_until(start)
        return until is not None and until - start < MIN_TEXT_CHUNK and not req.media.needs_embeds(start, until)

    def _chunk_of(self, req: Req, ready: int) -> int:
        """Return how many of the `ready` tokens to compute in this step: all, or a chunk that ends on a page boundary,
        so that it can be shared at once, or 0 to leave them to a later step."""
        limit = self._rem_input if self._rem_chunk is None else min(self._rem_chunk, self._rem_input)
        if ready <= limit:
            return ready
        if self._rem_chunk is None:
            return 0 if self.can_run else ready
        self.full = True
        if ready == req.extend_len and ready <= min(limit + self._stretch, self._rem_input):
            return ready
        # a chunk smaller than a page only where it is all that the settings allow
        return self._whole_pages(req, limit) or (0 if self.can_run else limit)

    def _whole_pages(self, req: Req, length: int) -> int:
        """Return the most of the next `length` tokens that end on a page boundary, and where states can be kept."""
        for size in (self.kv.cut_size, self.kv.page_size):
            whole = (req.kv_len + length) // size * size - req.kv_len
            if whole > 0:
                return whole
        return 0
