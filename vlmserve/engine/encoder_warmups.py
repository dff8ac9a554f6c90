"""Media that are encoded ahead of time, beside the requests.

A warmup holds a few of its temporal patches at a time, so memory does not grow with a video's length. It holds a patch
until its embeddings are on disk, so confirmed embeddings are durable. Without a disk tier they stay in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from vision.encoder_pool import EncoderPool
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve.ipc.messages import EncodedItem, EncodeOutput, EncodeReqInput, FinishReason

# Patches that are encoded and being written to disk may be held, too: in all, so many times `max_patches`.
_SAVING_FACTOR = 4


@dataclass
class _Held:
    """A temporal patch of item number `item`. order, place: as in the pool. ready: its embeddings have come. asked: the
    pool was asked to save them."""

    key: bytes
    order: int
    place: int
    item: int
    patch: TemporalPatch
    ready: bool = False
    asked: bool = False


class _Warmup:
    """The items of a message: their results so far, the patches held, and the patches still to be asked for."""

    def __init__(self, message: EncodeReqInput, *, saved: bool | None) -> None:
        self.rid = message.rid
        self.pin = message.pin
        self.items = [
            EncodedItem(modality=item.modality, temporal_patches=len(item.patch_digests), saved=saved)
            for item in message.items
        ]
        self.waiting: deque[tuple[int, TemporalPatch]] = deque(
            (place, patch)
            for place, item in enumerate(message.items)
            for patch in temporal_patches(item, message.adapter)
        )
        self.held: list[_Held] = []


class EncoderWarmups:
    """Encodes media ahead of time: a client of an encoder pool that serves one message after the other.

    send: gets the answers. max_patches: so many vision patches are under way at a time. A larger temporal patch goes
    alone.
    """

    def __init__(self, pool: EncoderPool, *, send: Callable[[EncodeOutput], None], max_patches: int) -> None:
        self._pool = pool
        self._send = send
        self._max_patches = max_patches
        self._warmups: dict[str, _Warmup] = {}
        self._asked = 0  # temporal patches so far; patches of one order are encoded in the order they were asked for

    def __len__(self) -> int:
        return len(self._warmups)

    def add(self, message: EncodeReqInput) -> None:
        """Take a message. A later `advance` answers it."""
        saved = None if self._pool.store is None else True
        self._warmups[message.rid] = _Warmup(message, saved=saved)

    def abort(self, rid: str) -> bool:
        """Give a message up without an answer. Returns whether it was here. Patches that are being encoded are
        finished."""
        warmup = self._warmups.pop(rid, None)
        if warmup is not None:
            for held in warmup.held:
                self._pool.release([held.key], order=held.order, place=held.place)
        return warmup is not None

    def begin_anew(self) -> None:
        """Let go of all patches that are held, and ask for them again later: their keys have changed."""
        for warmup in self._warmups.values():
            for held in reversed(warmup.held):
                self._pool.release([held.key], order=held.order, place=held.place)
                warmup.waiting.appendleft((held.item, held.patch))
            warmup.held.clear()

    def advance(self, *, order: int | None) -> bool:
        """Let go of patches that are done, and ask for more. Call it after the pool's `advance`. Returns whether
        anything changed.

        order: the order of the patches that are asked for now; None asks for none.
        """
        changed = False
        for warmup in list(self._warmups.values()):
            error = next((error for held in warmup.held if (error := self._pool.error(held.key))), None)
            if error is None:
                kept = [held for held in warmup.held if not self._is_done(warmup, held)]
                changed |= len(kept) < len(warmup.held)
                warmup.held = kept
            if error is not None or not (warmup.held or warmup.waiting):
                self._answer(warmup, error)
                changed = True
        if order is not None:
            changed |= self._ask(order)
        return changed

    def _answer(self, warmup: _Warmup, error: str | None) -> None:
        self.abort(warmup.rid)
        reason = None
        if error is not None:
            text = f"a picture or video could not be encoded: {error}"
            reason = FinishReason(type="error", message=text, status=500)
        self._send(EncodeOutput(rid=warmup.rid, items=tuple(warmup.items), error=reason))

    def _is_done(self, warmup: _Warmup, held: _Held) -> bool:
        pool = self._pool
        held.ready = held.ready or pool.is_ready(held.key)
        if pool.store is None:
            saved = None
            done = held.ready
        else:
            saved = self._is_saved(warmup, held)
            done = saved is not None
        if done:
            item, encoded = warmup.items[held.item], pool.was_encoded(held.key)
            warmup.items[held.item] = replace(
                item,
                encoded=item.encoded + encoded,
                patches_encoded=item.patches_encoded + encoded * held.patch.num_patches,
                saved=None if saved is None else bool(item.saved) and saved,
            )
            pool.release([held.key], order=held.order, place=held.place)
        return done

    def _is_saved(self, warmup: _Warmup, held: _Held) -> bool | None:
        """Return whether embeddings are on disk, pinned if the message asks for it; None while they are being saved."""
        pool, key = self._pool, held.key
        if held.asked or not warmup.pin:
            saved = pool.is_saved(key)
            if saved or held.asked:
                return saved
            if pool.is_saving(key):  # the pool does that by itself
                return None
        if pool.is_ready(key):  # otherwise they were evicted meanwhile
            pool.save(key, pin=warmup.pin)
            held.asked = True
        return None

    def _ask(self, order: int) -> bool:
        """Hold as many more temporal patches as fit, of the first messages. Returns whether there were any."""
        everything = [held for warmup in self._warmups.values() for held in warmup.held]
        total = sum(held.patch.num_patches for held in everything)
        under_way = sum(held.patch.num_patches for held in everything if not held.ready)
        asked = False
        for warmup in self._warmups.values():
            while warmup.waiting:
                number, patch = warmup.waiting[0]
                size = patch.num_patches
                if total and (
                    under_way + size > self._max_patches or total + size > _SAVING_FACTOR * self._max_patches
                ):
                    return asked
                warmup.waiting.popleft()
                (key,) = self._pool.submit([patch], order=order, place=self._asked)
                warmup.held.append(_Held(key, order, self._asked, number, patch))
                self._asked += 1
                under_way, total, asked = under_way + size, total + size, True
        return asked
