"""Maps req_pool_idx to the KV slots of a request's tokens: the worker's table on the device, the scheduler's on the
host."""

from __future__ import annotations

import copy

import numpy as np
import torch

from vlmserve_common.errors import EngineError


class ReqToTokenPool:
    """The device table that attention reads: `req_to_token` int32 [size + 1, max_context_len].

    Entries beyond a request's length are stale. The last row, `padding_row`, belongs to requests that pad a batch. All
    its entries are slot 0, in the dummy page (see `TokenToKVPoolAllocator`). whole_pages: each row begins with a page.
    windows: layers with windows have slots of their own (see `WindowPool`), in `window_table`.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str, *, windows: bool = False) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.padding_row = size
        self.whole_pages = True
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32, device=device)
        self.window_table = torch.zeros_like(self.req_to_token) if windows else None

    def write(self, req_pool_idx: int, start: int, slots: torch.Tensor | np.ndarray) -> None:
        """Set the slots (int [n]) of tokens start..start+n-1 of a request."""
        _check_range(req_pool_idx, start, start + len(slots), self.size, self.max_context_len)
        self.req_to_token[req_pool_idx, start : start + len(slots)] = torch.as_tensor(
            slots, device=self.req_to_token.device
        )

    def without_first(self) -> ReqToTokenPool:
        """Return the table of the same requests without their first tokens, in the same memory."""
        other = copy.copy(self)
        other.req_to_token, other.whole_pages = self.req_to_token[:, 1:], False
        other.max_context_len -= 1
        return other

    def check_tokens(self, req_pool_indices: np.ndarray, positions: np.ndarray) -> None:
        """Raise EngineError unless all of these tokens (int64 [n] each) have places in the table."""
        if len(positions):
            first, last = int(req_pool_indices.min()), int(req_pool_indices.max())
            for req_pool_idx, end in ((first, 0), (last, int(positions.max()) + 1)):
                _check_range(req_pool_idx, 0, end, self.size, self.max_context_len)

    def write_tokens(
        self,
        req_pool_indices: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        window_slots: torch.Tensor | None = None,
    ) -> None:
        """Set the slots (int32 [n]) of tokens `positions` of requests (int64 [n]) at once. All arrays are on the
        device, and were checked before."""
        self.req_to_token[req_pool_indices, positions] = slots
        if window_slots is not None:
            assert self.window_table is not None, "slots of layers with windows, and no table"
            self.window_table[req_pool_indices, positions] = window_slots


class ReqPoolAllocator:
    """Hands out places in the request pool, and knows the KV slots of each on the host, where they are planned."""

    def __init__(self, size: int, max_context_len: int) -> None:
        self.size = size
        self._slots = np.zeros((size, max_context_len), dtype=np.int32)
        self._free = list(range(size))[::-1]

    def available_size(self) -> int:
        """Free places."""
        return len(self._free)

    def alloc(self) -> int | None:
        """Return a free req_pool_idx, or None."""
        return self._free.pop() if self._free else None

    def free(self, req_pool_idx: int) -> None:
        """Take a place back; its slots are not touched."""
        self._free.append(req_pool_idx)

    def slots(self, req_pool_idx: int, start: int, end: int) -> np.ndarray:
        """Return a copy of the slots int64 [end - start] of tokens [start, end) of a held place."""
        return self._slots[req_pool_idx, start:end].astype(np.int64)

    def slot(self, req_pool_idx: int, place: int) -> int:
        """Return the slot of token number `place` of a held place."""
        return int(self._slots[req_pool_idx, place])

    def slots_at(self, req_pool_indices: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the slot int64 [n] of one token, number `places` (int64 [n]), of each of the held places (int64
        [n])."""
        return self._slots[req_pool_indices, places].astype(np.int64)

    def write_at(self, req_pool_indices: np.ndarray, places: np.ndarray, slots: np.ndarray) -> None:
        """Set the slot (int [n]) of one token, number `places` (int64 [n]), of each of the held places."""
        self._slots[req_pool_indices, places] = slots

    def write(self, req_pool_idx: int, start: int, slots: np.ndarray) -> None:
        """Set the slots (int [n]) of tokens start..start+n-1 of a held place."""
        self._slots[req_pool_idx, start : start + len(slots)] = slots


def _check_range(req_pool_idx: int, start: int, end: int, size: int, max_context_len: int) -> None:
    if not 0 <= req_pool_idx < size:
        raise EngineError(f"req_pool_idx {req_pool_idx} is outside of the {size} there are (--max-running-requests)")
    if not 0 <= start <= end <= max_context_len:
        raise EngineError(f"tokens {start}..{end} are outside of a context of {max_context_len} (--max-model-len)")
