"""Who owns a request's KV slots, and every step of changing hands.

Slots of a request, in order: locked tree slots (`protected_len`), then the request's own. Slots move

* allocator -> request when tokens are to be scheduled (`extend`),
* request -> tree when a prompt is computed or a request ends (`share`, `release`): full pages only. Pages that the
  tree has already are given back to the allocator and replaced by the tree's,
* tree -> allocator by eviction,
* request -> allocator for the last, partial page (`release`).

A session keeps the slots of a conversation's last turn locked in the tree until its next turn (`Sessions`).

Slots of layers with windows hang on these (`WindowPool`). A request holds them from the first page that its next token
sees on. Pages that its window has passed are let go when a step has come: then none of its steps reads them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vlmserve.ipc.messages import Carried
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.radix_cache import MatchResult, RadixCache
from vlmserve.memory.radix_tree import RadixNode
from vlmserve.memory.recurrent_states import RecurrentStates
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.memory.window_pool import WindowPool
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.request_states import RequestStates

MAX_ROOM = 1024


class KVCacheManager:
    """Gives KV slots and places in the request pool to requests, and takes them back.

    states: of recurrent layers. Their snapshots hang on KV pages: they are freed with the page, and a prefix is matched
    only up to the last one. windows: of layers with windows that have slots of their own. A prefix is matched only as
    far as the window before its end is there.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        prefix_cache: RadixCache,
        req_pool: ReqPoolAllocator,
        *,
        states: RequestStates | None = None,
        windows: WindowPool | None = None,
    ) -> None:
        assert states is None or windows is None, "no model has both"
        self.states, self.windows = states, windows
        self._hangs_on: RecurrentStates | WindowPool | None = windows if states is None else states.pool
        if self._hangs_on is not None:
            allocator.on_free = self._hangs_on.free_pages
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self.req_pool = req_pool

    @property
    def page_size(self) -> int:
        """Return how many slots a page has."""
        return self.allocator.page_size

    @property
    def cut_size(self) -> int:
        """Return the number of tokens at whose multiples prompts are best cut: whole pages, where states can be
        kept."""
        return self.page_size if self.states is None else self.states.unit

    def reachable(self) -> int:
        """Return how many slots are free or could be freed by eviction."""
        return self.allocator.available_size() + self.prefix_cache.evictable_size()

    def matched_len(self, req: Req) -> int:
        """Return how many tokens of a waiting request are cached, leaving at least one to compute."""
        if self._hangs_on is not None:
            return self._hangs_on.resumable(self.prefix_cache.match_slots(self.key_of(req), req.namespace))
        return self.prefix_cache.match_len(self.key_of(req), req.namespace)

    @property
    def may_carry(self) -> bool:
        """Whether KV may stand for that of other prompts: nothing else hangs on its pages."""
        return self._hangs_on is None

    def matched_path(self, req: Req) -> list[int]:
        """Return the numbers of the prefix cache's nodes along a waiting request's cached prefix, from the root."""
        return self.prefix_cache.path_ids(self.key_of(req), req.namespace)

    def key_of(self, req: Req) -> np.ndarray:
        """Return the key of a waiting request in the prefix cache, int64: all its tokens but the last one, or fewer."""
        return req.radix_key(req.matchable_len)

    def start(self, req: Req) -> MatchResult | None:
        """Give a waiting request a place in the pool and its cached prefix, locked. None if no place is free."""
        req_pool_idx = self.req_pool.alloc()
        if req_pool_idx is None:
            return None
        req.req_pool_idx = req_pool_idx
        key = self.key_of(req)
        if self._hangs_on is not None:  # which is not kept on the host: no prefix comes from there
            key = key[: self.matched_len(req)]
        match = self.prefix_cache.match_prefix(key, req.namespace)
        self._take_prefix(req, match)
        if self.states is not None:
            self.states.begin(req, int(match.indices[-1]) if len(match.indices) else None)
        return match

    def load_back(self, req: Req, match: MatchResult) -> None:
        """Add the part of its prefix that `start` found on the host, as far as there is room for it."""
        if match.host_len:
            self._take_prefix(req, self.prefix_cache.load_back(match))

    def _take_prefix(self, req: Req, match: MatchResult) -> None:
        self.prefix_cache.inc_lock_ref(match.last_node)
        self._unlock(req)
        assert req.req_pool_idx is not None
        self.req_pool.write(req.req_pool_idx, 0, match.indices)
        req.last_node, req.prefix_unsent = match.last_node, True
        req.kv_len = req.kv_allocated_len = req.kv_committed_len = req.protected_len = len(match.indices)
        if self.windows is not None:
            req.window_start = self.windows.first_page(req.kv_len) * self.page_size
            self.windows.hold(self.windows.seen_behind(match.indices))
        if not req.output_ids:
            req.cached_tokens = req.kv_len

    def cancel_start(self, req: Req) -> None:
        """Undo `start` for a request that was not scheduled after all."""
        self._unlock(req)
        self._leave_pool(req)

    def extend(self, req: Req, length: int) -> bool:
        """Slots for `length` tokens more, evicting if need be. False, and nothing changed, if they do not fit."""
        assert req.req_pool_idx is not None
        start = req.kv_allocated_len
        end = start + length
        last = self.slot(req, start - 1)
        if (end - 1) // self.page_size == (start - 1) // self.page_size and start:  # on its last page
            self.req_pool.write(req.req_pool_idx, start, np.arange(last + 1, last + 1 + length))
            req.kv_allocated_len = end
            return True
        needed = self.allocator.tokens_needed(start, end)
        if self.windows is not None and needed > self.windows.available_size():
            return False
        if needed > self.allocator.available_size():
            self.prefix_cache.evict(needed - self.allocator.available_size())
        room = min(max(req.fill_len - end, 0) + req.remaining_new_tokens, MAX_ROOM)
        slots = self.allocator.alloc_extend(start, end, last, room=room)
        if slots is None:
            return False
        self.req_pool.write(req.req_pool_idx, start, slots)
        req.kv_allocated_len = end
        if self.windows is not None:
            self.windows.add(self._pages(req, start, end))
        return True

    def extend_by_one(self, reqs: Sequence[Req]) -> None:
        """A slot for the next token of each running request; there must be room, by eviction if need be."""
        size, allocator = self.page_size, self.allocator
        rows = np.array([req.req_pool_idx for req in reqs], dtype=np.int64)
        places = np.array([req.kv_len for req in reqs], dtype=np.int64)
        slots = self.req_pool.slots_at(rows, places - 1) + 1
        full = np.flatnonzero(places % size == 0).tolist()
        if len(full) * size > allocator.available_size():
            self.prefix_cache.evict(len(full) * size - allocator.available_size())
        for at in full:
            req = reqs[at]
            room = min(req.max_new_tokens - len(req.output_ids) - req.in_flight, MAX_ROOM)
            slot = allocator.alloc_next_page(int(slots[at]) - 1, room)
            assert slot is not None, f"no slot for {req.rid} although there was room"
            slots[at] = slot
        if self.windows is not None:
            self.windows.add(slots[full] // size)
        self.req_pool.write_at(rows, places, slots)
        for req in reqs:
            req.kv_allocated_len = req.kv_len + 1

    def truncate(self, req: Req, end: int) -> None:
        """Drop the KV of a request from token `end` on, where it continues. No step in flight may compute for it."""
        assert req.kv_committed_len <= end <= req.kv_allocated_len == req.kv_len, (req.rid, end, req.kv_len)
        self.allocator.truncate(end, self.slots(req, end, req.kv_len))
        req.kv_len = req.kv_allocated_len = end

    def commit(self, req: Req, end: int) -> None:
        """Note that a step has come: the request's KV is there up to token `end`."""
        assert req.kv_committed_len <= end <= req.kv_len, (req.rid, req.kv_committed_len, end, req.kv_len)
        req.kv_committed_len = end
        if self.windows is not None:
            self._pass_window(self.windows, req)

    def _pass_window(self, windows: WindowPool, req: Req) -> None:
        """Let go of what is behind a request's window: that of its last whole page, as it may end there in the prefix
        tree. For prompts that begin alike it is worth keeping what was found in the tree, and what an equal prompt goes
        on from. The rest of the prompt is worth less, and the answer nothing."""
        size = self.page_size
        start = windows.first_page(req.kv_committed_len // size * size) * size
        if start <= req.window_start:
            return
        prompt, found = req.prompt_len // size * size, req.cached_tokens
        last = max(found, windows.first_page((req.prompt_len - 1) // size * size) * size)
        for low, high, worth in ((0, found, 1), (found, last, 0), (last, prompt, 1), (prompt, start, -1)):
            first, end = max(low, req.window_start), min(high, start)
            if first < end:
                windows.let_go(self._pages(req, first, end), worth=worth if self.prefix_cache.shares else -1)
        req.window_start = start

    def share(self, req: Req) -> None:
        """Put the computed full pages of a request into the prefix cache, and lock them there."""
        cache = self.prefix_cache
        if not cache.shares:
            return
        assert req.req_pool_idx is not None
        full = req.kv_committed_len // self.page_size * self.page_size
        if full <= req.protected_len:
            return
        key, slots = req.radix_key(full), self.slots(req, 0, full)
        already = cache.insert(key, slots, req.namespace, priority=-req.priority)
        match = cache.match_prefix(key, req.namespace, count_hit=False)
        assert len(match.indices) == full, (req.rid, len(match.indices), full)
        if already > req.protected_len:
            ours, theirs = (part[req.protected_len : already] for part in (slots, match.indices))
            if self._hangs_on is not None:
                self._hangs_on.replace_pages(*(part[:: self.page_size] // self.page_size for part in (ours, theirs)))
            self.allocator.free(ours)  # computed twice
            self.req_pool.write(req.req_pool_idx, req.protected_len, match.indices[req.protected_len :])
            req.prefix_unsent = True
        self.prefix_cache.inc_lock_ref(match.last_node)
        self._unlock(req)
        req.last_node, req.protected_len = match.last_node, full

    def release(self, req: Req) -> None:
        """Take all slots from a request that ends or is retracted; committed tokens stay cached.

        Steps in flight may still write to these slots. That does no harm: steps are computed in the order of their
        launch, so the next owner writes to the slots later.
        """
        end = req.kv_allocated_len
        last = self.slot(req, end - 1)
        self.share(req)
        # the partial last page and slots of steps in flight; all of them without a prefix cache
        self.allocator.free(self.slots(req, req.protected_len, end))
        self.allocator.release_room(last)
        self._unlock(req)
        self._leave_pool(req)

    def _unlock(self, req: Req) -> None:
        if req.last_node is not None:
            self.prefix_cache.dec_lock_ref(req.last_node)
            req.last_node = None

    def _leave_pool(self, req: Req) -> None:
        assert req.req_pool_idx is not None
        if self.states is not None:
            self.states.end(req)
        if self.windows is not None:
            self.windows.let_go(self._pages(req, req.window_start, req.protected_len))
        self.req_pool.free(req.req_pool_idx)
        req.req_pool_idx, req.prefix_unsent = None, False
        req.kv_len = req.kv_allocated_len = req.kv_committed_len = req.protected_len = 0

    def slot(self, req: Req, place: int) -> int:
        """Return the slot of a token; -1 for the token before the first."""
        assert req.req_pool_idx is not None
        return self.req_pool.slot(req.req_pool_idx, place) if place >= 0 else -1

    def slots(self, req: Req, start: int, end: int) -> np.ndarray:
        """Return the slots of tokens [start, end) of a request, int64."""
        assert req.req_pool_idx is not None
        return self.req_pool.slots(req.req_pool_idx, start, end)

    def _pages(self, req: Req, start: int, end: int) -> np.ndarray:
        """Return the pages, int64, that begin among tokens [start, end) of a request."""
        size = self.page_size
        return self.slots(req, -(-start // size) * size, end)[::size] // size


class _LastTurn(NamedTuple):
    """What a session keeps: the locked prefix of its last turn, when that ended, the namespace of its KV, and the pages
    (int64) that it holds in the pool of layers with windows."""

    node: RadixNode
    at_s: float
    namespace: bytes
    pages: np.ndarray


class Sessions:
    """Keeps the KV of conversations between their turns, least recently used first.

    Without a session, a prefix that no request uses is the first to be evicted. A session keeps the prefix of its last
    turn locked until slots run out, until it is idle for too long, or until there are too many sessions. Of layers with
    windows it holds the last window.

    timeout_s: how long an idle session is kept. clock: in seconds.
    """

    def __init__(
        self,
        prefix_cache: RadixCache,
        *,
        max_sessions: int,
        timeout_s: float,
        clock: Callable[[], float],
        windows: WindowPool | None = None,
    ) -> None:
        self._cache, self._windows = prefix_cache, windows
        self._max = max_sessions
        self._timeout_s = timeout_s
        self._clock = clock
        self._sessions: dict[str, _LastTurn] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, name: str, key: np.ndarray, namespace: bytes = b"") -> None:
        """Keep the cached prefix of this key as a turn ends, and let go of the turn before."""
        if not self._max or not self._cache.shares:
            return
        match = self._cache.match_prefix(key, namespace, count_hit=False)
        before = self._sessions.pop(name, None)
        if len(match.indices):
            self._cache.inc_lock_ref(match.last_node)
            pages, windows = match.indices[:0], self._windows
            if windows is not None and windows.resumable(match.indices) == len(match.indices):
                pages = windows.seen_behind(match.indices)
                windows.hold(pages)
            self._sessions[name] = _LastTurn(match.last_node, self._clock(), namespace, pages)
        if before is not None:
            self._let_go(before)
        if len(self._sessions) > self._max:
            self.release_oldest()

    def carry(self, name: str, carried: Carried, epoch: bytes, key: np.ndarray, namespace: bytes) -> None:
        """Cache the beginning of a session's next prompt, with KV of the last one, if that is still there. epoch: of
        the weights. key: of the next prompt."""
        last = self._sessions.get(name)
        if last is not None and last.namespace == epoch + carried.cache_salt.encode():
            self._cache.carry(last.node, carried.places, key, namespace)

    def expire(self) -> None:
        """Let go of sessions that have been idle for too long."""
        while self._sessions and next(iter(self._sessions.values())).at_s < self._clock() - self._timeout_s:
            self.release_oldest()

    def release_oldest(self) -> bool:
        """Let the oldest session go. Returns whether there was one."""
        if not self._sessions:
            return False
        self._let_go(self._sessions.pop(next(iter(self._sessions))))
        return True

    def _let_go(self, turn: _LastTurn) -> None:
        if self._windows is not None:
            self._windows.let_go(turn.pages)
        self._cache.dec_lock_ref(turn.node)

    def release_all(self) -> None:
        """Let all sessions go."""
        while self.release_oldest():
            pass
