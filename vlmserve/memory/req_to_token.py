"""Request row -> KV slots of its tokens: the worker's table on the device, and the scheduler's rows on the host."""

from __future__ import annotations

import numpy as np
import torch

from vlmserve_common.errors import EngineError


class ReqToTokenPool:
    """The device table that attention reads: `req_to_token` int32 [size, max_context_len].

    Entries beyond a request's length are stale and mean nothing.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros((size, max_context_len), dtype=torch.int32, device=device)

    def write(self, row: int, start: int, slots: torch.Tensor | np.ndarray) -> None:
        """Set the slots (int [n]) of tokens start..start+n-1 of a row."""
        _check_range(row, start, start + len(slots), self.size, self.max_context_len)
        self.req_to_token[row, start : start + len(slots)] = torch.as_tensor(slots, device=self.req_to_token.device)

    def write_tokens(self, rows: np.ndarray, positions: np.ndarray, slots: torch.Tensor) -> None:
        """Set the slots (int [n], on the device) of tokens `positions` (int64 [n]) of `rows` (int64 [n]) at once."""
        if len(rows):
            for row, end in ((int(rows.min()), 0), (int(rows.max()), int(positions.max()) + 1)):
                _check_range(row, 0, end, self.size, self.max_context_len)
        index = (torch.from_numpy(rows), torch.from_numpy(positions))
        device = self.req_to_token.device
        self.req_to_token[tuple(part.to(device) for part in index)] = slots.to(self.req_to_token.dtype)


class ReqRowAllocator:
    """Hands out request rows and knows the slots of each on the host, where they are planned and freed."""

    def __init__(self, size: int, max_context_len: int) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self._slots = np.zeros((size, max_context_len), dtype=np.int32)
        self._free = list(range(size))[::-1]
        self._held = [False] * size

    def available_size(self) -> int:
        """Free rows."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A free row, or None."""
        if not self._free:
            return None
        row = self._free.pop()
        self._held[row] = True
        return row

    def free(self, row: int) -> None:
        """Give a row back; its slots are not touched. Raises EngineError for a row that is not held."""
        self._check_held(row)
        self._held[row] = False
        self._free.append(row)

    def slots(self, row: int, start: int, end: int) -> np.ndarray:
        """Slots int64 [end - start] of tokens [start, end) of a held row: a copy."""
        self._check_held(row)
        _check_range(row, start, end, self.size, self.max_context_len)
        return self._slots[row, start:end].astype(np.int64)

    def write(self, row: int, start: int, slots: np.ndarray) -> None:
        """Set the slots (int [n]) of tokens start..start+n-1 of a held row."""
        self._check_held(row)
        _check_range(row, start, start + len(slots), self.size, self.max_context_len)
        self._slots[row, start : start + len(slots)] = slots

    def _check_held(self, row: int) -> None:
        if not 0 <= row < self.size or not self._held[row]:
            raise EngineError(f"request row {row} of {self.size} is not held")


def _check_range(row: int, start: int, end: int, size: int, max_context_len: int) -> None:
    if not 0 <= row < size:
        raise EngineError(f"request row {row} is outside of the {size} there are (--max-running-requests)")
    if not 0 <= start <= end <= max_context_len:
        raise EngineError(f"tokens {start}..{end} are outside of a row of {max_context_len} (--max-model-len)")
