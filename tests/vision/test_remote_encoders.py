"""Encoders on other servers: rows as at home, whatever the encoders and the network between do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from tests.vision.backends import collect
from tests.vision.fake_backend import ROW_BYTES
from tests.vision.patches import random_patches
from tests.vision.remote_encoders import (
    TOWER,
    Encoder,
    Network,
    PixelTower,
    batch_of,
    consumer,
    consumer_pool,
    picture,
    rows_of,
)
from vision.encoder_pool import EmbedShape
from vision.remote import encode_service, encoder_link, encoder_server, protocol, remote_backend
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.workers.inline import InlineBackend
from vlmserve_common.transport import peers

PATIENCE_S = 30.0


def await_that(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second becomes a twentieth."""
    for module in (encoder_link, encode_service, encoder_server):
        for name in ("RENEW_S", "SILENT_S", "LEASE_S", "_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name) / 20)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """No socket, pipe or thread outlives a test."""
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    gc.collect()
    await_that(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before)


@pytest.fixture
def encoders() -> Iterator[list[Encoder]]:
    made: list[Encoder] = []
    yield made
    for encoder in made:
        encoder.close()


@pytest.fixture
def encoder(encoders: list[Encoder]) -> Encoder:
    encoders.append(Encoder())
    return encoders[0]


def is_up(backend, links: int = 1) -> None:
    await_that(lambda: backend.stats().links == links)


def assert_rows(backend, *numbers: int, start: bool = True) -> None:
    """Assert that these pictures have their rows. start: they are not asked for yet."""
    for number in numbers if start else ():
        backend.start(0, batch_of(number))
    results = {result.number: result for result in collect(backend, len(numbers))}
    for number in numbers:
        assert results[number].error == ""
        assert torch.equal(results[number].embeds[0], rows_of(picture(number)))


def assert_let_go(encoder: Encoder) -> None:
    """Assert that an encoder holds nothing for anybody."""
    await_that(lambda: encoder.stats.open == 0)
    assert encoder.pool.cache.device.held_bytes == 0
    assert not encoder.pool.stats().queued


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_rows_are_those_of_home_bit_for_bit_and_pixels_travel_once(family, tmp_path, encoders):
    tower = load_tower(make_checkpoint(family, tmp_path / "model"), dtype=torch.float32)
    runner = TowerRunner(tower, torch.device("cpu"))
    shape = EmbedShape(merge=tower.spatial_merge_size, width=tower.row_width, dtype=torch.float32)
    identity = replace(TOWER, dtype="float32", width=shape.width, merge=shape.merge)
    encoders.append(Encoder(InlineBackend(runner), tower=identity, shape=shape))
    patches = random_patches(tower)
    expected = [runner.encode([patch])[0] for patch in patches]
    pixels = sum(patch.pixels.nbytes for patch in patches)
    sent = []
    for _ in range(2):  # another consumer, which has cached nothing
        backend = remote_backend.RemoteBackend(
            PixelTower(), [encoders[0].url], tower=identity, rows=shape.of, key=None, timeout_s=PATIENCE_S
        )
        is_up(backend)
        pool = consumer_pool(backend, shape, 2**20)
        keys = pool.submit(patches, order=1)
        await_that(lambda pool=pool, keys=keys: pool.advance() is None or all(map(pool.is_ready, keys)))
        for key, rows in zip(keys, expected, strict=True):
            assert torch.equal(pool.embeds(key), rows)
        pool.release(keys, order=1)
        stats = pool.stats()
        assert (stats.link.rows, stats.link.home) == (len(patches), 0)
        sent.append(stats.link.sent_bytes)
        pool.close()
        assert_let_go(encoders[0])
    assert encoders[0].pool.stats().encoded == len(patches)
    assert sent[0] > pixels
    assert sent[1] < 1000 * len(patches)


def test_bfloat16_rows_travel_as_they_are(encoders, tmp_path):
    shape = EmbedShape(merge=2, width=2, dtype=torch.bfloat16)
    identity, home = replace(TOWER, dtype="bfloat16"), PixelTower()
    rows = torch.tensor([[1.5, -2.0]] * 4, dtype=torch.bfloat16)
    there = Encoder(home, tower=identity, shape=shape)
    encoders.append(there)
    there.pool.cache.add(encode_key(there, 1), rows)
    with consumer(there.url, tower=identity) as backend:
        is_up(backend)
        backend.start(0, batch_of(1))
        [result] = collect(backend, 1)
        assert torch.equal(result.embeds[0], rows)


def encode_key(encoder: Encoder, number: int) -> bytes:
    return encoder.pool.key(picture(number))


def test_a_requests_pictures_are_spread_and_a_picture_goes_to_the_same_encoder_again(encoders):
    encoders += [Encoder(), Encoder()]
    with consumer(*(encoder.url for encoder in encoders)) as backend:
        is_up(backend, 2)
        for number in range(0, 10, 2):
            for encoder in encoders:
                encoder.backend.open = False
            for one in (number, number + 1):
                backend.start(0, batch_of(one))
            await_that(lambda: [encoder.stats.open for encoder in encoders] == [1, 1])
            for encoder in encoders:
                encoder.backend.open = True
            assert_rows(backend, number, number + 1, start=False)
        for number in range(20, 30):  # one at a time
            assert_rows(backend, number)
    with consumer(*(encoder.url for encoder in reversed(encoders))) as backend:
        is_up(backend, 2)
        for number in range(20, 30):
            assert_rows(backend, number)
        assert backend.stats().pixels == 0
    for encoder in encoders:
        assert encoder.pool.stats().encoded > 4
        assert_let_go(encoder)


PLACES = [0.0, 0.05, 0.3, 0.6, 0.9, 0.999]


@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("kind", ["cut", "garble", "stall"])
def test_whatever_the_network_does_at_whatever_place_the_rows_are_right(kind, direction, encoder):
    def through(harm):
        network = Network(encoder.port)
        network.harm = harm
        try:
            with consumer(network.url) as backend:
                if harm is None or harm[2] > handshake:
                    is_up(backend)
                assert_rows(backend, next(numbers))
                stats = backend.stats()
            return network.passed, stats.rows + stats.home
        finally:
            network.close()

    numbers, handshake = iter(range(100)), 0
    passed, _ = through(None)
    handshake = 700  # and both identities
    whole = passed[direction]
    assert whole > 2 * handshake or direction == "in"
    for place in PLACES if kind != "stall" else PLACES[1::2]:
        _, made = through((kind, direction, int(place * whole)))
        assert made == 1
        assert_let_go(encoder)
    await_that(lambda: encoder.stats.links == 0)


def test_an_encoder_that_is_late_is_left_out_and_let_go(encoders):
    late = PixelTower()
    late.open = False
    encoders += [Encoder(late)]
    with consumer(encoders[0].url, timeout_s=0.3) as backend:
        is_up(backend)
        assert_rows(backend, 1, 2)
        assert (backend.stats().late, backend.stats().home) == (2, 2)
        assert_let_go(encoders[0])
        began = time.monotonic()
        assert_rows(backend, 3)  # it rests
        assert time.monotonic() - began < 0.3
        assert backend.stats().asked == 2


def test_an_encoder_that_ends_or_falls_silent_while_it_encodes_is_replaced_by_another(encoders, monkeypatch):
    monkeypatch.setattr(encoder_server, "LEASE_S", PATIENCE_S)  # the consumer has to notice
    monkeypatch.setattr(encode_service, "SILENT_S", PATIENCE_S)
    slow, network = PixelTower(), None
    slow.open = False
    encoders += [Encoder(slow), Encoder()]
    network = Network(encoders[0].port)
    urls = network.url, encoders[1].url
    try:
        with consumer(*urls) as backend:
            is_up(backend, 2)
            for number in range(6):
                backend.start(0, batch_of(number))
            await_that(lambda: len(slow.batches) > 0)
            network.stalled = True
            assert_rows(backend, *range(6), start=False)
            assert backend.stats().home == 0
            assert_let_go(encoders[1])
            network.stalled = False
            is_up(backend, 2)
            for number in range(10, 16):
                backend.start(0, batch_of(number))
            await_that(lambda: encoders[0].stats.open > 0)
            encoders[0].close()
            assert_rows(backend, *range(10, 16), start=False)
            assert backend.stats().home == 0
    finally:
        network.close()


def test_what_an_encoder_cannot_encode_is_encoded_by_another_or_at_home(encoders):
    encoders += [Encoder(), Encoder()]
    for encoder in encoders:
        encoder.backend.fail[picture(1).digest] = 10
    encoders[0].backend.fail[picture(2).digest] = 10
    with consumer(*(encoder.url for encoder in encoders)) as backend:
        is_up(backend, 2)
        assert_rows(backend, 1)
        assert (backend.stats().asked, backend.stats().home) == (2, 1)
        assert_rows(backend, 2)
        assert backend.stats().home == 1
        assert backend.stats().links == 2
        for encoder in encoders:
            assert_let_go(encoder)


def test_without_a_worker_at_home_the_failure_is_the_pictures_own(caplog):
    home = PixelTower()
    with consumer("tcp://127.0.0.1:9", home=home) as backend:
        assert_rows(backend, 1)
        home.usable = []
        backend.start(0, batch_of(2))
        [result] = collect(backend, 1)
        assert "no vision encoder worker is left" in result.error


OTHERS = {
    "family": ("qwen9_vl", "model family is qwen9_vl there and fake here"),
    "fingerprint": ("11" * 32, "tower's fingerprint is 1111111111111111 there and 0000000000000000 here"),
    "dtype": ("bfloat16", "dtype is bfloat16 there and int32 here"),
    "width": (4, "row width is 4 there and 2 here"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_tower_is_named_once_and_not_used(name, encoders, caplog):
    value, words = OTHERS[name]
    encoders.append(Encoder(tower=replace(TOWER, **{name: value})))
    with caplog.at_level(logging.INFO), consumer(encoders[0].url) as backend:
        await_that(lambda: caplog.text.count("the link of") >= 2)  # it was tried again
        assert_rows(backend, 1)
        assert backend.stats().asked == 0
    told = [record.message for record in caplog.records if "not used" in record.message]
    assert told == [f"the encoder {encoders[0].url} is not used: it has another tower: {words}"]


@pytest.mark.parametrize(
    ("there", "here"),
    [("a" * 16, "b" * 16), ("a" * 16, None), (None, "b" * 16)],
    ids=["other", "none here", "none there"],
)
def test_a_wrong_key_is_refused_and_the_right_one_is_not(there, here, encoders, caplog):
    encoders.append(Encoder(key=there))
    with consumer(encoders[0].url, key=there) as backend:
        is_up(backend)
        assert_rows(backend, 1)
    with caplog.at_level(logging.INFO), consumer(encoders[0].url, key=here) as backend:
        await_that(lambda: "not used: the two servers have different keys (setting --peer-key)" in caplog.text)
        assert_rows(backend, 2)
        assert backend.stats().asked == 0
    assert "a" * 16 not in caplog.text
    assert "b" * 16 not in caplog.text


def test_an_impostor_that_does_not_know_the_key_gets_nothing(caplog):
    """A server that accepts every caller: its own proof is missing."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard = []

    def impostor():
        async def talk():
            sock, _ = listener.accept()
            connection = peers.PeerConnection(sock)
            await connection.send(peers.Challenge(protocol=protocol.PROTOCOL, nonce=b"n" * 32))
            heard.append(await connection.receive(4096))
            await connection.send(peers.Accepted(proof=b"p" * 32))
            connection.close()

        asyncio.run(talk())

    thread = threading.Thread(target=impostor)
    thread.start()
    with consumer(f"tcp://127.0.0.1:{listener.getsockname()[1]}", key="k" * 16):
        await_that(lambda: "different keys" in caplog.text)
    thread.join()
    listener.close()
    assert b"k" * 16 not in heard[0].proof


def test_another_version_is_named(encoders, caplog, monkeypatch):
    monkeypatch.setattr(encoder_server, "PROTOCOL", protocol.PROTOCOL + 1)
    encoders.append(Encoder())
    with consumer(encoders[0].url):
        await_that(
            lambda: (
                f"the protocol's version is {protocol.PROTOCOL + 1} there and {protocol.PROTOCOL} here" in caplog.text
            )
        )


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x02\0\0\0" + b"\xff" * 32, b""],
    ids=["http", "frames", "lengths", "nothing"],
)
def test_garbage_ends_its_own_connection_alone(data, encoder, caplog):
    with consumer(encoder.url) as backend, caplog.at_level(logging.INFO):
        is_up(backend)
        with socket.create_connection(("127.0.0.1", encoder.port)) as sock:
            sock.settimeout(PATIENCE_S)
            sock.sendall(data)
            with contextlib.suppress(OSError):  # the encoder may have ended it already
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
        await_that(lambda: re.search("the link of 127.0.0.1:.* has ended", caplog.text))
        assert_rows(backend, 1)
        assert backend.stats().home == 0


def test_pixels_owed_by_a_consumer_that_is_gone_come_from_another(encoder):
    network = Network(encoder.port)
    try:
        with consumer(network.url) as first, consumer(encoder.url) as second:
            is_up(first)
            is_up(second)
            network.harm = ("stall", "out", network.passed["out"] + 3000)  # amid the pixels
            big = picture(1, (16, 16))
            first.start(0, batch_of(1, big))
            await_that(lambda: encoder.service._asked)
            second.start(0, batch_of(1, big))
            [result] = collect(second, 1)
            assert torch.equal(result.embeds[0], rows_of(big))
            assert second.stats().home == 0
            [result] = collect(first, 1)
            assert torch.equal(result.embeds[0], rows_of(big))
            assert first.stats().home == 1
        assert_let_go(encoder)
    finally:
        network.close()


def test_a_batch_goes_on_without_the_picture_of_a_consumer_that_is_gone(encoder, monkeypatch):
    for module in (encoder_server, encode_service):
        monkeypatch.setattr(module, "LEASE_S", PATIENCE_S)  # what is silent, and owes pixels, goes sooner
    network, tower = Network(encoder.port), encoder.backend
    try:
        with consumer(network.url) as first, consumer(encoder.url) as second:
            is_up(first)
            is_up(second)
            tower.open = False
            for number in (1, 2):  # all that a worker gets ahead
                second.start(0, batch_of(number))
                await_that(lambda number=number: len(tower.batches) == number)
            first.start(0, batch_of(3))
            second.start(0, batch_of(4))
            await_that(lambda: encoder.stats.open == 4)
            network.stalled = True
            tower.open = True
            assert_rows(second, 1, 2, 4, start=False)
            assert second.stats().home == 0
            assert_rows(first, 3, start=False)
            assert first.stats().home == 1
        assert_let_go(encoder)
    finally:
        network.close()


def test_pictures_that_need_more_room_than_there_is_pass_one_after_the_other(encoders):
    encoders.append(Encoder(space_bytes=5 * ROW_BYTES))  # of 4 rows each
    with consumer(encoders[0].url) as first, consumer(encoders[0].url) as second:
        is_up(first)
        is_up(second)
        for number in range(6):
            first.start(0, batch_of(number))
            second.start(0, batch_of(number))
        assert_rows(first, *range(6), start=False)
        assert_rows(second, *range(6), start=False)
        assert first.stats().home == second.stats().home == 0
    assert_let_go(encoders[0])


def test_what_nobody_wants_any_more_is_let_go(encoder):
    encoder.backend.open = False
    with consumer(encoder.url) as backend:
        is_up(backend)
        backend.start(0, batch_of(1))
        await_that(lambda: encoder.backend.batches)
        backend.cancel(0, 1)
        [result] = collect(backend, 1)
        assert (result.embeds, result.untried) == (None, True)
        assert_let_go(encoder)
        assert encoder.backend.cancelled


def test_a_picture_of_an_impossible_shape_is_refused(encoder):
    with consumer(encoder.url) as backend:
        is_up(backend)
        backend._rows = lambda patch: (5, 2)
        assert_rows(backend, 1)
        assert backend.stats().home == 1
        assert backend.stats().links == 1
        assert not encoder.backend.batches
    assert_let_go(encoder)
