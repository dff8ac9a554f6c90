"""Messages over real ipc sockets: order, large arrays, garbage."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from vlmserve.ipc.channels import Channels
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    BatchTokenOutput,
    EncodeReqInput,
    RequestsLost,
    SamplingParams,
    TokenizedGenerateReqInput,
    TokenOutput,
    rids_of,
)
from vlmserve.ipc.sockets import AsyncReceiver, Receiver, Sender
from vlmserve_common.transport.shm import SharedArrays

TYPES = (TokenizedGenerateReqInput, AbortReq)
ABORT = [b"", b"AbortReq", b"\x81\xa3rid\xa1r"]
Damage = Callable[[list[bytes], SharedArrays], None]


def _request(size: int, rid: str = "r") -> TokenizedGenerateReqInput:
    ids = np.arange(size, dtype=np.int64)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids, sampling_params=SamplingParams(stop=("\n", "é")))


@pytest.fixture
def channels(tmp_path: Path) -> Channels:
    (tmp_path / "shm").mkdir()
    return Channels.in_directories(tmp_path, tmp_path / "shm")


@pytest.fixture
def receiver(channels: Channels) -> Iterator[Receiver]:
    receiver = Receiver(channels.scheduler, TYPES, shared=channels.shared_arrays())
    yield receiver
    receiver.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def _sender(channels: Channels, **options: Any) -> Sender:
    return Sender(channels.scheduler, TYPES, **{"shared": channels.shared_arrays(), **options})


@pytest.mark.parametrize("size", [0, 1, 5000, 200_000])
@pytest.mark.parametrize("shared", [True, False])
def test_a_message_arrives_as_it_was(channels: Channels, receiver: Receiver, size: int, shared: bool) -> None:
    sender = _sender(channels, **({} if shared else {"shared": None}))
    sent = _request(size)
    sender.send(sent)
    got = receiver.recv(10)
    sender.close()
    assert got.rid == sent.rid
    assert got.sampling_params == sent.sampling_params
    np.testing.assert_array_equal(got.input_ids, sent.input_ids)
    if size:
        got.input_ids[0] = 7  # writable, however it travelled: torch wants that
    assert channels.shared_arrays().outstanding() == 0


def test_order_is_kept_and_nothing_is_dropped_or_waited_for(channels: Channels) -> None:
    sender = _sender(channels)
    for index in range(5000):  # far over ZeroMQ's own default mark of 1000, and before there is a receiver
        sender.send(AbortReq(rid=str(index)))
    receiver = Receiver(channels.scheduler, TYPES)
    got: list[AbortReq] = []
    while len(got) < 5000:
        messages = receiver.drain(10)
        assert messages
        got += messages
    assert [message.rid for message in got] == [str(index) for index in range(5000)]
    assert receiver.recv(0.0) is None
    assert receiver.drain() == []
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"AbortReq"],
        [b"AbortReq", b"\xc1"],
        [b"AbortReq", b"\x81\xa3rid\x05"],
        [b"NoSuchMessage", b"\x80"],
        [b"\xff\xfe", b"\x80", b"x" * 100_000],
        [b"TokenizedGenerateReqInput", b"\x83\xa3rid\xa1r\xa9input_ids\x93\xa3<i8\x91\x01\x63\xafsampling_params\x80"],
    ],
)
def test_garbage_is_logged_and_dropped(
    channels: Channels,
    receiver: Receiver,
    frames: list[bytes],
    pipe: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(channels.scheduler)
        raw.send_multipart([b"\xff[", *frames])
        raw.send_multipart(frames)
        raw.send_multipart(ABORT)
        # garbage does not end a wait, not even one that a file descriptor may end
        assert receiver.recv(10, [pipe[0]]) == AbortReq(rid="r")
    assert caplog.text.count("dropped a malformed message") == 2


def _encoded(channels: Channels, size: int = 100_000, rid: str = "lost") -> list[bytes]:
    """A message's frames: envelope, type, body, and its array's if that is small."""
    frames = Frames(_sender(channels))
    frames.sender.send(_request(size, rid))
    frames.sender.close()
    return frames.sent


class Frames:
    """Keeps what a sender would have sent."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.sent: list[bytes] = []
        sender.send_frames = lambda frames: self.sent.extend(map(bytes, frames))  # type: ignore[method-assign]


def _set(place: int, frame: bytes) -> Damage:
    return lambda frames, shared: frames.__setitem__(place, frame)


def _cut(frames: list[bytes], shared: SharedArrays) -> None:
    del frames[2:]


def _lose_block(frames: list[bytes], shared: SharedArrays) -> None:
    for path in shared.directory.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "damage", [_set(2, b"\x83\xa3rid"), _set(2, b"\x81\xa3rid\x05"), _set(1, b"NoSuchType"), _cut, _lose_block]
)
def test_of_a_damaged_message_its_requests_are_known_and_its_arrays_are_freed(
    channels: Channels, receiver: Receiver, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    shared = channels.shared_arrays()
    frames = _encoded(channels)
    assert shared.outstanding() == 1
    damage(frames, shared)
    _encoded(channels, rid="other's")
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(channels.scheduler)
        raw.send_multipart(frames)
        raw.send_multipart(ABORT)
        got = receiver.recv(10)
        assert isinstance(got, RequestsLost)
        assert got.rids == ("lost",)
        assert "damaged on its way" in got.message
        assert shared.outstanding() == 1, "another message's is left alone"
        assert receiver.recv(10) == AbortReq(rid="r")
    assert "malformed message of" in caplog.text
    assert "about 1 requests" in caplog.text


BOTH = tuple(
    TokenOutput(rid=rid, token_ids=(), finish_reason=None, prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    for rid in "ab"
)


def test_where_even_the_requests_cannot_be_read_that_is_all(
    channels: Channels, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is made up from envelopes that are none."""
    envelopes = [b"", b"\xff", b"[", b"[" * 100_000, b"3", b"[3, 4]", b'["lost", "x"]', b"[[3], []]", b'[["lost"]]']
    frames = _encoded(channels, size=10)
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(channels.scheduler)
        for envelope in envelopes:
            raw.send_multipart([envelope, frames[1], b"\xc1"])
        raw.send_multipart(ABORT)
        assert receiver.recv(10) == AbortReq(rid="r")
    assert caplog.text.count("about 0 requests") == len(envelopes)


def test_nothing_is_freed_but_shared_blocks(channels: Channels, receiver: Receiver) -> None:
    for name in ("1-0123abcd-2.own", "precious"):
        (Path(channels.shared_dir) / name).touch()
    (Path(channels.shared_dir).parent / "precious").touch()
    frames = _encoded(channels, size=10)
    names = ["1-0123abcd-2.own", "precious", "../precious", "", ".", "1-0123abcd-3"]
    with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
        raw.connect(channels.scheduler)
        raw.send_multipart([json.dumps([["lost"], names]).encode(), frames[1], b"\xc1"])
        assert receiver.recv(10).rids == ("lost",)
    assert sorted(path.name for path in Path(channels.shared_dir).iterdir()) == ["1-0123abcd-2.own", "precious"]
    assert (Path(channels.shared_dir).parent / "precious").exists()


def test_the_async_receiver(channels: Channels) -> None:
    async def play() -> list[str]:
        came: asyncio.Queue[Any] = asyncio.Queue()
        sender = Sender(channels.api, TYPES, shared=channels.shared_arrays())
        sender.send(AbortReq(rid="early"))
        receiver = AsyncReceiver(
            channels.api, TYPES, came.put_nowait, broken=came.put_nowait, shared=channels.shared_arrays()
        )
        assert (await asyncio.wait_for(came.get(), 10)).rid == "early"
        with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
            raw.connect(channels.api)
            raw.send_multipart([b"junk"])
            raw.send_multipart([b'[["lost", "too"], []]', b"AbortReq", b"junk"])
            assert (await asyncio.wait_for(came.get(), 10)).rids == ("lost", "too")
            for index in range(100):
                sender.send(_request(20_000 * (index % 2), rid=str(index)))
            got = [await asyncio.wait_for(came.get(), 10) for _ in range(100)]
        sender.close()
        receiver.close()
        receiver.close()
        assert [len(message.input_ids) for message in got] == [0, 20_000] * 50
        return [message.rid for message in got]

    assert asyncio.run(play()) == [str(index) for index in range(100)]
    assert channels.shared_arrays().outstanding() == 0


def test_the_async_receiver_takes_turns(channels: Channels) -> None:
    """With thousands of messages, as after many clients have left, others are not to wait for the last."""

    async def play() -> list[str]:
        order: list[str] = []
        now, done, loop = 0.0, asyncio.Event(), asyncio.get_running_loop()

        def handle(message: AbortReq) -> None:
            nonlocal now
            now += 0.01
            order.append(message.rid)
            if len(order) == 1:
                loop.call_soon(order.append, "another")
            if message.rid == "99":
                done.set()

        sender = Sender(channels.api, TYPES)
        for index in range(100):
            sender.send(AbortReq(rid=str(index)))
        receiver = AsyncReceiver(channels.api, TYPES, handle, broken=pytest.fail, turn_s=0.05, clock=lambda: now)
        await asyncio.wait_for(done.wait(), 10)
        sender.close()
        receiver.close()
        return order

    order = asyncio.run(play())
    assert order.index("another") <= 5
    order.remove("another")
    assert order == [str(index) for index in range(100)]


def test_a_broken_async_receiver_says_so_once(channels: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> list[Exception]:
        told: list[Exception] = []
        broken = asyncio.Event()

        def note(error: Exception) -> None:
            told.append(error)
            broken.set()

        receiver = AsyncReceiver(channels.api, TYPES, pytest.fail, broken=note)
        monkeypatch.setattr(zmq.Socket, "recv_multipart", _fail_to_receive)
        sender = Sender(channels.api, TYPES)
        sender.send(AbortReq(rid="r"))
        await asyncio.wait_for(broken.wait(), 10)
        sender.close()
        receiver.close()
        return told

    assert [str(error) for error in asyncio.run(play())] == ["no more"]


def _fail_to_receive(*args: object, **options: object) -> None:
    raise OSError("no more")


def test_a_message_prepared_in_another_thread(channels: Channels, receiver: Receiver) -> None:
    """Its arrays are copied there; sending it is little work. One that is not sent leaves nothing behind."""
    sender = _sender(channels)
    sent = _request(200_000)
    with ThreadPoolExecutor(1) as thread:
        kept, dropped = (thread.submit(sender.prepare, sent).result() for _ in range(2))
    assert channels.shared_arrays().outstanding() == 2
    dropped.discard()
    assert channels.shared_arrays().outstanding() == 1
    sent.input_ids[0] = 7  # no longer looked at
    kept.send()
    got = receiver.recv(10)
    sender.close()
    np.testing.assert_array_equal(got.input_ids, _request(200_000).input_ids)
    assert channels.shared_arrays().outstanding() == 0


@pytest.mark.parametrize(
    ("message", "rids"),
    [
        (BatchTokenizedGenerateReqInput(requests=(_request(1, "a"), _request(1, "b"))), ("a", "b")),
        (BatchTokenOutput(outputs=BOTH), ("a", "b")),
        (EncodeReqInput(rid="a", items=()), ("a",)),
        (RequestsLost(rids=("a", "b"), message=""), ("a", "b")),
        (object(), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_requests_that_a_message_is_about(message: object, rids: tuple[str, ...]) -> None:
    assert rids_of(message) == rids


def test_a_wait_ends_with_a_message_or_when_a_file_descriptor_is_readable(
    channels: Channels, receiver: Receiver, pipe: tuple[int, int]
) -> None:
    wake_from, wake_to = pipe
    sender = _sender(channels)
    assert receiver.recv(0.01, [wake_from]) is None
    sender.send(AbortReq(rid="0"))
    assert receiver.recv(30, [wake_from]) == AbortReq(rid="0")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(receiver.drain, None, [wake_from])
        os.write(wake_to, b"!")
        assert waiting.result(30) == []
    for rid in ("1", "2"):
        sender.send(AbortReq(rid=rid))
    got: list[AbortReq] = []
    while len(got) < 2:  # each try ends at once, message or not
        got += receiver.drain(None, [wake_from])
    assert [message.rid for message in got] == ["1", "2"]
    sender.close()
