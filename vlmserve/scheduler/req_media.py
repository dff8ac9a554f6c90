"""The temporal patches of one request: which tokens need whose rows, and which rows the request holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from processors.inputs import MultimodalInputs
from vision.encoder_pool import EncoderPool
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve.executor.model_worker_batch import MediaRows


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchSpan:
    """Tokens [start, end) of a prompt take rows of `patch`, from row number `row` on."""

    start: int
    end: int
    patch: TemporalPatch
    row: int


def patch_spans(mm_inputs: MultimodalInputs | None) -> list[PatchSpan]:
    """Where a prompt's temporal patches stand in it, in order. A range of tokens may hold several of them."""
    spans = []
    for item in mm_inputs.items if mm_inputs is not None else ():
        patches = temporal_patches(item)
        rows_each = item.num_tokens // len(patches)
        row = 0  # of the item
        for first, last in item.offsets:
            token = first
            while token < last:
                end = min(last, token + rows_each - row % rows_each)
                spans.append(PatchSpan(start=token, end=end, patch=patches[row // rows_each], row=row % rows_each))
                row += end - token
                token = end
    return spans


class ReqMedia:
    """Holds, of an encoder pool, the rows that the rest of a prompt needs.

    order: of the request among all; those of lower order are encoded first.
    """

    def __init__(self, mm_inputs: MultimodalInputs | None, pool: EncoderPool, *, order: int) -> None:
        self._spans = patch_spans(mm_inputs)
        self._ends = [span.end for span in self._spans]
        self._pool = pool
        self._order = order
        self._keys: list[bytes] = [b""] * len(self._spans)
        self._held_from = len(self._spans)  # spans from here on are held

    def want(self, start: int) -> None:
        """Hold what tokens from `start` on need, and nothing else."""
        first = bisect_right(self._ends, start)
        if first < self._held_from:
            more = [span.patch for span in self._spans[first : self._held_from]]
            self._keys[first : self._held_from] = self._pool.submit(more, order=self._order, place=first)
            self._held_from = first
        else:
            self._release_until(first)

    def want_nothing(self) -> None:
        """Give up all rows."""
        self._release_until(len(self._spans))

    def _release_until(self, first: int) -> None:
        self._pool.release(self._keys[self._held_from : first], order=self._order, place=self._held_from)
        self._held_from = first

    def ready_until(self) -> int | None:
        """The first token whose rows are wanted and not ready; None if there is none."""
        for span, key in self._held():
            if not self._pool.is_ready(key):
                return span.start
        return None

    def first_unready(self) -> bytes | None:
        """The key of the first wanted rows that are not ready; None if there are none."""
        return next((key for _, key in self._held() if not self._pool.is_ready(key)), None)

    def has_rows_before(self, end: int) -> bool:
        """Whether a wanted token before `end` takes a row."""
        return self._held_from < len(self._spans) and self._spans[self._held_from].start < end

    def holds(self, keys: Collection[bytes]) -> bytes | None:
        """One of `keys` that is held, or None."""
        return next((key for _, key in self._held() if key in keys), None)

    def rows(self, start: int, end: int, *, at: int) -> list[MediaRows]:
        """What tokens [start, end) take, where `start` is token number `at` of a batch. The rows must be ready."""
        found = []
        for span, key in self._held():
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                row = span.row + low - span.start
                rows = self._pool.rows(key)[row : row + high - low]
                found.append(MediaRows(token=at + low - start, rows=rows))
        return found

    def _held(self) -> Iterator[tuple[PatchSpan, bytes]]:
        for place in range(self._held_from, len(self._spans)):
            yield self._spans[place], self._keys[place]
