"""The media of one request: which tokens need which embeddings, which ones the request holds, and whose come first."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from processors.inputs import MultimodalInputs
from vision.encoder_pool import EncoderPool
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve.executor.model_worker_batch import MMEmbeds


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchSpan:
    """Tokens [start, end) of a prompt take embeddings of `patch`, from number `offset` on."""

    start: int
    end: int
    patch: TemporalPatch
    offset: int


def patch_spans(mm_inputs: MultimodalInputs | None) -> list[PatchSpan]:
    """Find the temporal patches of a prompt, in order. A range of tokens may hold several patches."""
    spans = []
    for item in mm_inputs.items if mm_inputs is not None else ():
        patches = temporal_patches(item)
        each = item.num_tokens // len(patches)
        done = 0  # of the item's
        for first, last in item.offsets:
            token = first
            while token < last:
                end = min(last, token + each - done % each)
                spans.append(PatchSpan(start=token, end=end, patch=patches[done // each], offset=done % each))
                done += end - token
                token = end
    return spans


def num_patches(mm_inputs: MultimodalInputs | None) -> int:
    """Count the vision patches of a prompt's media, without media that came encoded."""
    items = mm_inputs.items if mm_inputs is not None else ()
    return sum(math.prod(item.grid_thw) for item in items if not item.encoded)


class ReqMedia:
    """Holds the embeddings that the rest of a prompt needs, in an encoder pool.

    order: lower orders are encoded first. ends: where the tokens of each picture or video end.
    """

    def __init__(self, mm_inputs: MultimodalInputs | None, pool: EncoderPool, *, order: int) -> None:
        self._spans = patch_spans(mm_inputs)
        self._ends = [span.end for span in self._spans]
        self.ends = tuple(item.offsets[-1][1] for item in (mm_inputs.items if mm_inputs is not None else ()))
        self._pool = pool
        self.order = order
        self._keys: list[bytes] = [b""] * len(self._spans)
        self._held_from = len(self._spans)  # spans from here on are held

    def hold_from(self, start: int) -> None:
        """Hold the embeddings that tokens from `start` on need, and no others."""
        first = bisect_right(self._ends, start)
        if first < self._held_from:
            more = [span.patch for span in self._spans[first : self._held_from]]
            self._keys[first : self._held_from] = self._pool.submit(more, order=self.order, place=first)
            self._held_from = first
        else:
            self._release_until(first)

    def release(self) -> None:
        """Give all embeddings up."""
        self._release_until(len(self._spans))

    def _release_until(self, first: int) -> None:
        self._pool.release(self._keys[self._held_from : first], order=self.order, place=self._held_from)
        self._held_from = first

    def ready_until(self, start: int = 0) -> int | None:
        """Return the first token from `start` on whose embedding is held and not ready; None if there is none.
        Embeddings of earlier tokens may be gone by now."""
        for span, key in self._held():
            if span.end > start and not self._pool.is_ready(key):
                return max(span.start, start)
        return None

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
        for span, key in self._held():
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                first = span.offset + low - span.start
                embeds = self._pool.embeds(key)[first : first + high - low]
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
