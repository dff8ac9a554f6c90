"""What an encoder tells its consumers, event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.vision.fake_backend import EMBED_SHAPE, ROW_BYTES
from tests.vision.remote_encoders import PixelTower, picture, rows_of
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EncoderPool, PoolLimits
from vision.remote.encode_service import EncodeService, PixelsOnDemand
from vision.remote.protocol import Answer, Ask, Pixels, Pull, Release, Status


class Consumers:
    """In place of an `EncoderServer`: events to take, and what was sent."""

    def __init__(self) -> None:
        self.events: list[tuple[int, object]] = []
        self.sent: list[tuple[int, int, object]] = []
        self.dropped: list[int] = []

    def take(self):
        events, self.events = self.events, []
        return events

    def send(self, consumer, message):
        what = message.status if isinstance(message, Answer) else message.rows
        self.sent.append((consumer, message.number, what))

    def drop(self, consumer, reason):
        self.dropped.append(consumer)

    def silent_s(self, consumer):
        return 0.0


class Encoder:
    """A service with room for so many rows, each picture has 4. clock: seconds."""

    def __init__(self, rows: int) -> None:
        self.consumers, self.tower, self.clock = Consumers(), PixelTower(), [0.0]
        backend = PixelsOnDemand(self.tower)
        self.pool = EncoderPool(
            backend,
            EmbeddingCache(MemoryTier(rows * ROW_BYTES, torch.device("cpu"))),
            fingerprint=bytes(32),
            embed_shape=EMBED_SHAPE,
            limits=PoolLimits(max_patches=64, space_bytes=rows * ROW_BYTES, batches_ahead=3),
        )
        self.service = EncodeService(self.pool, backend, self.consumers, lambda: self.clock[0])

    def take(self, *events):
        """Return what is sent after some events, in order."""
        self.consumers.events += events
        self.consumers.sent = []
        while self.service.step(1.0):
            pass
        return self.consumers.sent


def ask(number: int, what: int) -> Ask:
    patch = picture(what)
    return Ask(number=number, patch=replace(patch, pixels=np.empty(0, np.uint8)), shape=EMBED_SHAPE.of(patch))


def pixels(number: int, what: int) -> Pixels:
    return Pixels(number=number, pixels=picture(what).pixels)


def test_rows_that_gave_way_after_they_were_announced_are_made_again():
    encoder = Encoder(rows=5)
    # the first picture waits for consumer 0, before the second, and for consumer 1, behind it
    sent = encoder.take((0, ask(1, 7)), (0, ask(2, 8)), (1, ask(1, 7)))
    assert sent[-1] == (0, 1, Status.MISSING)
    sent = encoder.take((0, pixels(1, 7)))
    assert sent == [(0, 1, Status.OK), (1, 1, Status.OK)]
    assert encoder.take((0, Release(number=1))) == [(0, 2, Status.MISSING)]  # it has made room
    assert encoder.take((1, Pull(number=1))) == [(1, 1, Status.NOT_READY)]
    assert encoder.take((0, pixels(2, 8))) == [(0, 2, Status.OK)]
    assert encoder.take((0, Release(number=2))) == [(1, 1, Status.MISSING)]
    assert encoder.take((1, pixels(1, 7))) == [(1, 1, Status.OK)]
    [(consumer, number, rows)] = encoder.take((1, Pull(number=1)))
    assert (consumer, number) == (1, 1)
    assert torch.equal(rows, rows_of(picture(7)))
    encoder.take((1, Release(number=1)))
    assert encoder.pool.cache.device.held_bytes == 0


def test_what_breaks_the_protocol_drops_its_consumer_alone():
    encoder = Encoder(rows=100)
    encoder.take((0, ask(1, 7)))
    for consumer, event in ((1, pixels(5, 7)), (2, Pull(number=1))):
        assert encoder.take((consumer, event)) == [(consumer, event.number, Status.ERROR)]
    for consumer, event in ((3, ask(1, 9)), (4, ask(1, 8))):
        encoder.take((consumer, event))
    encoder.take((3, ask(1, 9)), (4, pixels(1, 8)), (4, pixels(1, 8)))
    assert encoder.consumers.dropped == [3, 4]
    assert encoder.take((0, pixels(1, 7))) == [(0, 1, Status.OK)]


def test_pixels_that_are_owed_for_long_drop_the_consumer():
    encoder = Encoder(rows=100)
    encoder.take((0, ask(1, 7)))
    encoder.clock[0] = 29.0
    encoder.take()
    assert encoder.consumers.dropped == []
    encoder.clock[0] = 31.0
    encoder.take()
    assert encoder.consumers.dropped == [0]
