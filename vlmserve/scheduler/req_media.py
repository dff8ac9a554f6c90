"""The media of one request: which tokens need which embeddings, which ones the request holds, and whose come first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from processors.inputs import MultimodalInputs
from processors.pruning import BEFORE, BEHIND, STAYS
from vision.change import most_changed
from vision.encoder_pool import EncoderPool
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve.executor.model_worker_batch import MMEmbeds
from vlmserve_common.checkpoint.adapter_ref import AdapterRef
from vlmserve_common.compute.transfers import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchSpan:
    """Tokens [start, end) of a prompt take embeddings of `patch`, from number `offset` on.

    `rows`: the numbers of the patch's embeddings that tokens take, if others leave; None for all.
    `count`: if it is not 0, the patch has more embeddings than tokens: these take the `count` embeddings that differ
    most from those of the temporal patch before, which has the span before (see `vision.change`).
    """

    start: int
    end: int
    patch: TemporalPatch
    offset: int
    count: int = 0
    rows: np.ndarray | None = field(default=None, compare=False)


def patch_spans(mm_inputs: MultimodalInputs | None, adapter: AdapterRef | None = None) -> list[PatchSpan]:
    """Find the temporal patches of a prompt, in order. A range of tokens may hold several patches. adapter: the
    request's."""
    spans = []
    for item in mm_inputs.items if mm_inputs is not None else ():
        patches = temporal_patches(item, adapter)
        counts, place, done = item.patch_tokens, 0, 0  # the patch, and how many of its tokens have a span
        for first, last in item.offsets:
            token = first
            while token < last:
                end = min(last, token + counts[place] - done)
                chosen = counts[place] if item.counts and place else 0
                rows = _rows_behind(item.kept[place]) if item.kept else None
                span = PatchSpan(start=token, end=end, patch=patches[place], offset=done, count=chosen, rows=rows)
                spans.append(span)
                done += end - token
                token = end
                if done == counts[place]:
                    place, done = place + 1, 0
    spans.sort(key=lambda span: span.start)  # a clip's frames and its sound alternate
    return spans


def _rows_behind(kept: bytes) -> np.ndarray | None:
    """Return which of the embeddings of what is encoded stay; None for all. kept: as in `MultimodalDataItem`."""
    if BEHIND not in kept:
        return None
    places = np.frombuffer(kept, np.uint8)
    return np.flatnonzero(places[places != BEFORE] == STAYS)


def num_patches(mm_inputs: MultimodalInputs | None) -> int:
    """Count the vision patches of a prompt's media, without media that came encoded."""
    items = mm_inputs.items if mm_inputs is not None else ()
    return sum(item.num_patches for item in items)


class ReqMedia:
    """Holds the embeddings that the rest of a prompt needs, in an encoder pool.

    order: lower orders are encoded first. adapter: the request's. ends: where the tokens of each medium end, ascending.
    """

    def __init__(
        self,
        mm_inputs: MultimodalInputs | None,
        pool: EncoderPool,
        *,
        order: int,
        adapter: AdapterRef | None = None,
    ) -> None:
        self._spans = patch_spans(mm_inputs, adapter)
        self._ends = [span.end for span in self._spans]
        items = mm_inputs.items if mm_inputs is not None else ()
        self.ends = tuple(sorted(item.offsets[-1][1] for item in items))
        self._pool = pool
        self.order = order
        self._keys: list[bytes] = [b""] * len(self._spans)
        self._held_from = len(self._spans)  # spans from here on are held
        self._chosen: dict[int, np.ndarray] = {}  # by place, the numbers of embeddings that tokens take
        self.chooses = any(span.count for span in self._spans)

    def hold_from(self, start: int) -> None:
        """Hold the embeddings that tokens from `start` on need, and no others."""
        first = bisect_right(self._ends, start)
        if self.chooses and first < len(self._spans) and self._is_open(first):
            first -= 1  # what its tokens are is found by comparing
        if first < self._held_from:
            more = [span.patch for span in self._spans[first : self._held_from]]
            self._keys[first : self._held_from] = self._pool.submit(more, order=self.order, place=first)
            self._held_from = first
        else:
            self._release_until(first)

    def renew(self, start: int) -> None:
        """Hold embeddings for tokens from `start` on, all under the keys that they have now."""
        self.release()
        self._chosen.clear()
        self.hold_from(start)

    def release(self) -> None:
        """Give all embeddings up."""
        self._release_until(len(self._spans))

    def _release_until(self, first: int) -> None:
        self._pool.release(self._keys[self._held_from : first], order=self.order, place=self._held_from)
        self._held_from = first

    def ready_until(self, start: int = 0) -> int | None:
        """Return the first token from `start` on whose embedding is held and not ready; None if there is none.
        Embeddings of earlier tokens may be gone by now."""
        for place, (span, key) in enumerate(self._held(), self._held_from):
            if span.end > start and not (self._pool.is_ready(key) and self._is_chosen(place)):
                return max(span.start, start)
        return None

    def _is_open(self, place: int) -> bool:
        """Return whether the embeddings that a span's tokens take have yet to be chosen."""
        return self._spans[place].count > 0 and place not in self._chosen

    def _is_chosen(self, place: int) -> bool:
        """Return whether the embeddings that a held span's tokens take are known, or can be found by comparing. If
        those of the first held span are not known, it is only held to compare with."""
        return place == self._held_from or not self._is_open(place) or self._pool.is_ready(self._keys[place - 1])

    def _choice(self, place: int) -> np.ndarray | None:
        """Return the numbers of the embeddings that a span's tokens take; None for all, or before they can be known."""
        if self._is_open(place) and place > self._held_from:
            keys = self._keys[place - 1], self._keys[place]
            if all(map(self._pool.is_ready, keys)):
                width = self._pool.embed_shape.main_width or self._pool.embed_shape.width
                before, embeds = (self._pool.embeds(key)[:, :width] for key in keys)
                self._chosen[place] = most_changed(embeds, before, self._spans[place].count)
        return self._chosen.get(place)

    def place_chosen(self, positions: np.ndarray, start: int) -> np.ndarray:
        """Return the positions of tokens from `start` on as they are once embeddings are chosen: int64 [3, n], a
        copy. Before, a span's tokens have the positions of the first places of their grid."""
        positions, end = positions.copy(), start + positions.shape[1]
        for place in range(bisect_right(self._ends, start), len(self._spans)):
            span = self._spans[place]
            if span.start >= end:
                break
            chosen = self._choice(place)
            if chosen is None:
                continue
            low, high = max(span.start, start), min(span.end, end)
            before = np.arange(low - span.start, high - span.start)
            now = chosen[before]
            columns = span.patch.grid[1] // self._pool.embed_shape.merge
            positions[1, low - start : high - start] += now // columns - before // columns
            positions[2, low - start : high - start] += now % columns - before % columns
        return positions

    def first_unready(self) -> bytes | None:
        """Return the key of the first held embeddings that are not ready; None if there are none."""
        return next((key for _, key in self._held() if not self._pool.is_ready(key)), None)

    def needs_embeds(self, start: int, end: int) -> bool:
        """Return True if one of the tokens [start, end) takes an embedding that is held."""
        first = max(bisect_right(self._ends, start), self._held_from)
        return start < end and first < len(self._spans) and self._spans[first].start < end

    def holds(self, keys: Collection[bytes]) -> bytes | None:
        """Return one of `keys` that is held, or None."""
        return next((key for _, key in self._held() if key in keys), None)

    def was_encoded(self) -> bool:
        """Return True if some of the held embeddings were computed while they were held, and not found in a cache."""
        return any(self._pool.was_encoded(key) for _, key in self._held())

    def embeds(self, start: int, end: int, *, at: int) -> list[MMEmbeds]:
        """Return the embeddings of tokens [start, end), which must be ready. at: the number of `start` in the batch."""
        found = []
        for place, (span, key) in enumerate(self._held(), self._held_from):
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                first = span.offset + low - span.start
                embeds, rows = self._pool.embeds(key), self._choice(place) if span.count else span.rows
                assert rows is not None or not span.count, "embeddings are used before they are chosen"
                if rows is None:
                    embeds = embeds[first : first + high - low]
                else:
                    embeds = embeds[to_device(torch.from_numpy(rows[first : first + high - low]), embeds.device)]
                found.append(MMEmbeds(token=at + low - start, embeds=embeds))
        return found

    def _held(self) -> Iterator[tuple[PatchSpan, bytes]]:
        for place in range(self._held_from, len(self._spans)):
            yield self._spans[place], self._keys[place]


_REMEMBERED = 4096
_ARRIVAL_BITS = 40


class FairOrder:
    """The order in which pictures and videos of all clients are encoded: start-time fair queueing (Goyal, Vin and
    Cheng, 1996).

    A request's tag is where its client's work so far ends. A clock stands at the tag that was encoded last, and the
    lowest tag goes first. So a client with a hundred pictures and one with a single picture take turns, patch for
    patch.
    """

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}  # where each client's work ends, in patches
        self._latest = 0
        self._arrivals = 0

    def arrive(self) -> int:
        """Return the number of a new request, from 0 on."""
        self._arrivals += 1
        return self._arrivals - 1

    def tag(self, client: str, patches: int, arrival: int) -> int:
        """Return the tag of a new request; no two are equal. arrival: its number from `arrive`."""
        start = max(self._now, self._ends.pop(client, 0))
        self._ends[client] = start + patches
        if len(self._ends) > _REMEMBERED:
            del self._ends[next(iter(self._ends))]
        tag = start << _ARRIVAL_BITS | arrival << 1
        self._latest = max(self._latest, tag)
        return tag

    def behind_all(self) -> int:
        """Return a tag behind the tags of all requests so far, which no request has."""
        return self._latest | 1

    def encoded(self, tag: int) -> None:
        """Note that the media of a request are encoded."""
        self._now = max(self._now, tag >> _ARRIVAL_BITS)
