"""Admission of prompt chunks to a step, under budgets."""

from __future__ import annotations

import enum

from vlmserve.scheduler.kv_owner import KVOwner
from vlmserve.scheduler.req import Req

CLIP_MAX_NEW_TOKENS = 4096


class AddReqResult(enum.Enum):
    """Why adding went on or stopped."""

    CONTINUE = enum.auto()
    NO_TOKEN = enum.auto()  # KV slots or request rows are short
    OTHER = enum.auto()  # the step's own budgets are used up


class PrefillAdder:
    """Collects the prompt chunks of one step.

    Budgets, in tokens: KV slots (free or evictable, less what running requests are expected to need: their remaining
    output, clipped, times new_token_ratio), prompt tokens a step (max_prefill_tokens), chunk tokens a step
    (chunk_size; None leaves prompts whole), and vision patches a step (max_patches; one request may exceed it alone).
    """

    def __init__(
        self,
        kv: KVOwner,
        *,
        running: list[Req],
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunk_size: int | None,
        max_patches: int,
        mixed_decode_tokens: int = 0,
    ) -> None:
        self.kv = kv
        self.can_run: list[Req] = []
        self.new_chunked_req: Req | None = None
        self._nothing_runs = not running
        self._reserved = sum(
            min(req.remaining_new_tokens, CLIP_MAX_NEW_TOKENS) * new_token_ratio for req in running
        ) + kv.page_size * len(running)
        # decoding takes part of a mixed step, but a prompt in progress always gets on
        self._rem_input = max(max_prefill_tokens - mixed_decode_tokens, kv.page_size)
        self._rem_chunk = None if chunk_size is None else max(chunk_size - mixed_decode_tokens, kv.page_size)
        self._rem_patches = max_patches

    def add_chunked_req(self, req: Req) -> Req | None:
        """The next chunk of a request begun earlier; returns it if still more will follow, or does not fit now."""
        length = self._chunk_of(req, req.fill_len - req.kv_len)
        if length <= 0 or not self.kv.extend(req, length):
            return req
        self._take(req, length)
        return None if req.completes else req

    def add_one_req(self, req: Req) -> AddReqResult:
        """Try to admit a waiting request, which has no row yet; then it is in `can_run`, with slots for its chunk."""
        if self._rem_input <= 0 or (self._rem_chunk is not None and self._rem_chunk <= 0):
            return AddReqResult.OTHER
        if not self.kv.start(req):
            return AddReqResult.NO_TOKEN
        result = self._admit(req)
        if result is not AddReqResult.CONTINUE:
            self.kv.cancel_start(req)
        return result

    def _admit(self, req: Req) -> AddReqResult:
        extend = req.fill_len - req.kv_len
        alone = self._nothing_runs and not self.can_run
        expected = extend + min(req.remaining_new_tokens, CLIP_MAX_NEW_TOKENS) + self.kv.page_size
        # alone, everything unlocked can be evicted for it, and longer requests than the pool were refused on arrival
        if not alone and expected > self.kv.reachable() - self._reserved:
            return AddReqResult.NO_TOKEN
        patches = _patches(req, req.kv_len)
        length = self._chunk_of(req, extend)
        if length <= 0 or (self.can_run and patches > self._rem_patches):
            return AddReqResult.OTHER
        if not self.kv.extend(req, length):
            return AddReqResult.NO_TOKEN
        self._reserved += expected - length
        self._rem_patches -= patches
        self._take(req, length)
        if not req.completes:
            self.new_chunked_req = req
        return AddReqResult.CONTINUE

    def _chunk_of(self, req: Req, extend: int) -> int:
        """How many of the `extend` tokens to compute this step: all, a chunk that ends on a page boundary (so that it
        can be shared at once), or 0 to leave them to a later step."""
        if self._rem_chunk is None:
            return extend if extend <= self._rem_input or not self.can_run else 0
        limit = min(self._rem_chunk, self._rem_input)
        if extend <= limit:
            return extend
        size = self.kv.page_size
        whole = (req.kv_len + limit) // size * size - req.kv_len
        # a chunk smaller than a page only where it is all that the settings allow
        return whole if whole > 0 else (0 if self.can_run else limit)

    def _take(self, req: Req, length: int) -> None:
        self.can_run.append(req)
        self._rem_input -= length
        if self._rem_chunk is not None:
            self._rem_chunk -= length


def _patches(req: Req, start: int) -> int:
    """Vision patches that computing a request from token `start` on needs encoded."""
    items = {item.digest: item for item, *_ in req.media_ranges(start, req.prompt_len) if not item.encoded}
    return sum(t * h * w for t, h, w in (item.grid_thw for item in items.values()))
