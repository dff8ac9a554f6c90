"""Messages between servers arrive once, whole and in order, or not at all."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import numpy as np
import pytest

from vlmserve_common.transport import peers


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    text: str
    values: np.ndarray


NOTE = Note(text="a", values=np.arange(50_000, dtype=np.int16))
KEY = "k" * 16


async def connected() -> tuple[peers.PeerConnection, peers.PeerConnection]:
    options = {"protocol": 1, "key": KEY, "send_types": [Note], "receive_types": [Note]}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        calling = asyncio.create_task(peers.call(host, port, **options))
        await asyncio.sleep(0)
        sock, _ = await asyncio.to_thread(listener.accept)
        return await asyncio.gather(calling, peers.answer(sock, **options))


def run(test) -> None:
    async def both() -> None:
        ends = await connected()
        try:
            await test(*ends)
        finally:
            for end in ends:
                end.close()

    asyncio.run(both())


def test_messages_go_both_ways_and_are_counted():
    async def test(one, other):
        for sender, receiver in ((one, other), (other, one), (one, other)):
            _, got = await asyncio.gather(sender.send(NOTE), receiver.receive(10**6))
            assert got.text == "a"
            assert np.array_equal(got.values, NOTE.values)
        assert one.sent_bytes == other.received_bytes > 2 * NOTE.values.nbytes
        assert other.sent_bytes == one.received_bytes > NOTE.values.nbytes

    run(test)


@pytest.mark.parametrize("what", ["doubled", "left out", "sent back", "too large"])
def test_what_is_not_the_next_message_ends_the_connection(what):
    async def test(one, other):
        written = bytearray()
        write, one._write = one._write, lambda part: _keep(written, part)
        await one.send(Note(text="first", values=np.zeros(3)))
        first = bytes(written)
        await one.send(Note(text="second", values=np.zeros(3)))
        both, second = bytes(written), bytes(written)[len(first) :]
        most = 10 if what == "too large" else 10**6
        if what == "sent back":
            await other._write(first)
            with pytest.raises(peers.PeerError, match="damaged"):
                await one.receive(most)
            return
        await write({"doubled": first + first, "left out": second, "too large": both}[what])
        if what == "doubled":
            assert (await other.receive(most)).text == "first"
        with pytest.raises(peers.PeerError, match="the limit is 10" if most == 10 else "damaged"):
            await other.receive(most)

    run(test)


def test_a_caller_that_does_not_know_the_key_is_refused():
    """Also one that would not mind another key of the called side."""

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            loop = asyncio.get_running_loop()
            caller = peers.PeerConnection(socket.create_connection(listener.getsockname()))
            sock, _ = listener.accept()
            answering = loop.create_task(
                peers.answer(sock, protocol=1, key=KEY, send_types=[Note], receive_types=[Note])
            )
            await caller.receive(10**4)
            await caller.send(peers.Response(protocol=1, nonce=b"n" * 32, proof=b"p" * 32))
            accepted = await caller.receive(10**4)
            caller.close()
            assert (accepted.proof, accepted.refusal) == (
                b"",
                "the two servers have different keys (setting --peer-key)",
            )
            with pytest.raises(peers.PeerError, match="different keys"):
                await answering

    asyncio.run(test())


async def _keep(written: bytearray, part: bytes) -> None:
    written += part
