"""The client of servers: kept connections, answers that come in pieces, and servers that do not behave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from vlmserve.router.upstream import Server, ServerLostError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class RawServer:
    """Counts connections, and answers each request with bytes as they are. ends: close after an answer."""

    def __init__(self, answer: bytes = OK, *, ends: bool = False) -> None:
        self.answer = answer
        self.ends = ends
        self.connections = 0
        self.bodies: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await self._head(reader):
            body = b""
            if b"chunked" in head:
                while size := int(await reader.readline(), 16):
                    body += await reader.readexactly(size)
                    await reader.readline()
                await reader.readline()
            self.bodies.append(body)
            writer.write(self.answer)
            await writer.drain()
            if self.ends:
                break
        writer.close()

    @staticmethod
    async def _head(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""


def against(serve: Serve, work: Callable[[Server], Awaitable[None]]) -> None:
    """Do the work with a server of raw bytes."""

    async def run() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        server = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", connect_timeout_s=5.0)
        try:
            async with asyncio.timeout(20):
                await work(server)
        finally:
            server.cut("the test ends")
            listening.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n3\r\nay!\r\n0\r\n\r\n", b"okay!"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
    ],
)
def test_a_connection_is_kept(answer: bytes, whole: bytes):
    raw = RawServer(answer)

    async def work(server: Server) -> None:
        for _ in range(3):
            assert (await server.get(b"/"))[1] == whole

    against(raw, work)
    assert raw.connections == 1


def test_an_answer_without_a_length_ends_with_its_connection():
    raw = RawServer(b"HTTP/1.1 200 OK\r\n\r\nall of it", ends=True)

    async def work(server: Server) -> None:
        assert [await server.get(b"/") for _ in range(2)] == [(200, b"all of it")] * 2

    against(raw, work)
    assert raw.connections == 2


def test_a_kept_connection_that_the_server_ended_costs_nothing():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read(10)  # of the next request, which gets no answer
        writer.close()

    async def work(server: Server) -> None:
        assert [await server.get(b"/") for _ in range(3)] == [(200, b"ok")] * 3

    against(serve, work)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "it closed the connection"),
        (b"SSH-2.0-x\r\n\r\n", "its answer is no HTTP"),
        (b"", "it closed the connection"),
    ],
)
def test_an_answer_that_is_none_is_an_error(answer: bytes, why: str):
    async def work(server: Server) -> None:
        with pytest.raises(ServerLostError, match=why) as lost:
            await server.get(b"/")
        assert lost.value.reached

    against(RawServer(answer, ends=True), work)


def test_nobody_there_is_told_from_nobody_answering():
    async def work(server: Server) -> None:
        nobody = Server("http://127.0.0.1:1", connect_timeout_s=5.0)
        with pytest.raises(ServerLostError) as lost:
            await nobody.get(b"/")
        assert not lost.value.reached

    against(RawServer(), work)


def test_an_upload_ends_when_there_is_an_answer():
    raw = RawServer()

    async def parts() -> AsyncIterator[bytes]:
        yield b"some"
        yield b""
        yield b"thing"

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 10_000
            await asyncio.sleep(0)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        while await reader.read(100_000):
            pass
        writer.close()

    async def work(server: Server) -> None:
        answer = await server.ask("POST", b"/", body=parts(), repeatable=False)
        assert await answer.whole() == b"ok"
        answer.close()

    async def refused(server: Server) -> None:
        answer = await server.ask("POST", b"/", body=endless(), repeatable=False)
        assert (answer.status, await answer.whole()) == (413, b"no")
        answer.close()
        assert not server._idle, "the rest of the upload is still on its way"

    against(raw, work)
    assert raw.bodies == [b"something"]
    against(refuse, refused)


def test_a_reader_that_is_slow_holds_the_server_up_and_not_memory():
    size = 64 * 2**20
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * 2**20)
            await writer.drain()
            sent += 2**20
        writer.close()

    async def work(server: Server) -> None:
        answer = await server.ask("GET", b"/")
        for _ in range(200):
            await asyncio.sleep(0)
        assert answer._num_waiting < 2**20
        assert sent < size
        assert len(await answer.whole()) == size
        answer.close()

    against(serve, work)
