"""Control messages over a real socket: each answer finds its question, and garbage harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from tests.vlmserve.api.fake_engine import make_stats
from vlmserve.ipc.control_messages import (
    AbortRequestsReq,
    ControlRequest,
    ControlResult,
    EngineState,
    FlushCacheReq,
    GetServerInfoReq,
    ServerInfo,
)
from vlmserve.ipc.sockets import ControlClient, ControlServer

INFO = ServerInfo(stats=make_stats(), paused=False, profiling=True, device="cpu", dtype="bfloat16")
FLUSHED = EngineState(paused=False, flushed=1, num_running_reqs=0, num_waiting_reqs=0)
RESULTS = {GetServerInfoReq: INFO, FlushCacheReq: FLUSHED}


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/control"


@pytest.fixture
def server(address: str) -> Iterator[ControlServer]:
    server = ControlServer(address)
    yield server
    server.close()


def serve(server: ControlServer, questions: int, handle: Callable[[ControlRequest], ControlResult]) -> None:
    """Answer so many questions."""
    left = [questions]

    def counted(question: ControlRequest) -> ControlResult:
        left[0] -= 1
        return handle(question)

    while left[0]:
        assert server.socket.poll(20_000)
        server.answer_all(counted)


def test_answers_find_their_questions(server: ControlServer, address: str) -> None:
    def handle(question: ControlRequest) -> ControlResult:
        if isinstance(question, AbortRequestsReq):
            return EngineState(paused=False, flushed=int(question.rids[0]), num_running_reqs=0, num_waiting_reqs=0)
        assert isinstance(question, GetServerInfoReq)
        return INFO

    async def scenario() -> None:
        client = ControlClient(address)
        try:
            async with asyncio.timeout(20):
                numbers = [client.ask(AbortRequestsReq(rids=(str(n),))) for n in range(20)]
                *answers, info = await asyncio.gather(*numbers, client.ask(GetServerInfoReq()))
        finally:
            client.close()
        assert [answer.flushed for answer in answers] == list(range(20))
        assert info == INFO

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, server, 21, handle)
        asyncio.run(scenario())
        served.result(20)


def test_an_answer_that_nobody_waits_for_goes_to_nobody(server: ControlServer, address: str) -> None:
    async def scenario() -> None:
        client = ControlClient(address)
        try:
            late = asyncio.ensure_future(client.ask(FlushCacheReq()))
            await asyncio.to_thread(server.socket.poll, 20_000)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            with ThreadPoolExecutor(1) as pool:
                served = pool.submit(serve, server, 2, lambda question: RESULTS[type(question)])
                async with asyncio.timeout(20):
                    assert await client.ask(GetServerInfoReq()) == INFO
                served.result(20)
        finally:
            client.close()

    asyncio.run(scenario())


def test_garbage_is_refused_and_the_next_question_answered(server: ControlServer, address: str) -> None:
    with zmq.Socket(zmq.Context.instance(), zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart([b"1", b"FlushCacheReq", b"\xff"])
        socket.send_multipart([b"2", b"os.system", b"\x80"])
        socket.send_multipart([b"3", b"FlushCacheReq", b"\x80"])
        serve(server, 1, lambda _: FLUSHED)
        answers = []
        for _ in range(3):
            assert socket.poll(20_000)
            answers.append(socket.recv_multipart()[:2])
    assert answers == [[b"1", b"ControlRefused"], [b"2", b"ControlRefused"], [b"3", b"EngineState"]]
