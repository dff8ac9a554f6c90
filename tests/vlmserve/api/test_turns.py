"""The inputs of one body go to the engine some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from vlmserve.api.pooling.turns import LOT, outputs_of
from vlmserve.frontend.door import Door, Visit
from vlmserve.frontend.requests import ChatPrompt, GenerateReqInput, TextPrompt
from vlmserve.frontend.tokenizer_manager import ChoiceOutput
from vlmserve.ipc.messages import TokenOutput
from vlmserve_common.errors import BadRequestError


class Server:
    """Answers a request with its name as the text. room: for so many requests. refuses: so many lots are refused."""

    def __init__(self, *, room: int = 1000, refuses: int = 0, bad: str = "") -> None:
        self.manager = self
        self.door = Door()
        engine = SimpleNamespace(max_running_requests=1, max_queued_requests=room - 1)
        self.settings = SimpleNamespace(engine=engine)
        self.lots: list[list[str]] = []
        self.names = set[str]()
        self.under_way = self.most = 0
        self._refuses, self._bad = refuses, bad

    async def stream(self, *requests: GenerateReqInput, visit: Visit) -> AsyncIterator[list[ChoiceOutput]]:
        self.lots.append([request.group for request in requests])
        if len(self.lots) > 1 and self._refuses:
            self._refuses -= 1
            raise BadRequestError("full", status=429)
        assert requests[0].request_id not in self.names, "two lots of one name at a time"
        self.names.add(requests[0].request_id)
        await self.door.pass_through(visit)
        self.under_way += len(requests)
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0.001)
            for index, request in reversed([*enumerate(requests)]):
                if request.group == self._bad:
                    raise BadRequestError("bad", param=request.place)
                output = TokenOutput(request.group, (), None, 1, 0, 0)
                yield [ChoiceOutput(index=index, output=output)]
        finally:
            self.door.leave()
            self.names.remove(requests[0].request_id)
            self.under_way -= len(requests)


def texts(count: int) -> list[GenerateReqInput]:
    named: dict[str, Any] = {"request_id": "mine", "prompt": TextPrompt(text="a")}
    return [GenerateReqInput(group=str(at), place=f"input[{at}]", **named) for at in range(count)]


def picture(name: str) -> GenerateReqInput:
    message = {"role": "user", "content": [{"type": "image", "image": "x"}]}
    return GenerateReqInput(request_id="mine", group=name, prompt=ChatPrompt(messages=[message]))


def run(server: Server, wanted: list[GenerateReqInput]) -> list[str]:
    return [output.rid for output in asyncio.run(outputs_of(server, wanted))]  # type: ignore[arg-type]


def test_many_inputs_keep_their_order() -> None:
    server = Server()
    assert run(server, texts(1000)) == [str(at) for at in range(1000)]
    assert max(map(len, server.lots)) == LOT
    assert LOT < server.most <= 250  # others have room


def test_media_are_lots_of_their_own() -> None:
    server = Server()
    assert run(server, [*texts(2), picture("p"), picture("q"), *texts(1)]) == ["0", "1", "p", "q", "0"]
    assert sorted(server.lots) == [["0"], ["0", "1"], ["p"], ["q"]]


async def update(server: Server) -> int:
    """Change the weights while a body is under way; returns how many lots that waits for."""
    await asyncio.sleep(0.002)
    with server.door.shut("changing"):
        await server.door.empty()
        return len(server.lots)


def test_weights_do_not_change_in_the_middle_of_a_body() -> None:
    server = Server()

    async def both() -> int:
        lots, outputs = await asyncio.gather(update(server), outputs_of(server, texts(1000)))  # type: ignore[arg-type]
        assert len(outputs) == 1000
        return lots

    assert asyncio.run(both()) == len(server.lots) == -(-1000 // LOT)
    assert server.door.inside == 0


def test_a_body_is_computed_again_if_weights_change_while_it_is_paused() -> None:
    server = Server()

    async def both() -> None:
        body = asyncio.ensure_future(outputs_of(server, texts(1000)))  # type: ignore[arg-type]
        await asyncio.sleep(0.002)
        server.door.changes += 1
        assert len(await body) == 1000

    asyncio.run(both())
    assert len(server.lots) == 2 * -(-1000 // LOT)
    assert server.door.inside == 0


def test_a_body_in_front_of_the_door_waits_for_the_new_weights() -> None:
    server = Server()

    async def both() -> None:
        server.door.close("changing")
        body = asyncio.ensure_future(outputs_of(server, texts(1000)))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert server.under_way == 0
        server.door.open("changing")
        server.door.close("changing")  # before anybody has passed
        await asyncio.sleep(0.01)
        assert server.under_way == 0
        server.door.open("changing")
        assert len(await body) == 1000

    asyncio.run(both())
    assert server.door.inside == 0


def test_a_small_server_gets_small_lots() -> None:
    server = Server(room=4)
    assert len(run(server, texts(20))) == 20
    assert server.most == 4


def test_a_full_server_makes_later_lots_wait() -> None:
    server = Server(refuses=3)
    assert len(run(server, texts(3 * LOT))) == 3 * LOT
    assert len(server.lots) == 6


def test_a_full_server_refuses_the_first_lot() -> None:
    server = Server(refuses=9)
    server.lots.append([])  # another body's
    with pytest.raises(BadRequestError, match="full"):
        run(server, texts(1))


def test_a_bad_input_ends_the_others() -> None:
    server = Server(bad="40")
    with pytest.raises(BadRequestError) as refused:
        run(server, texts(200))
    assert refused.value.param == "input[40]"
    assert not server.names
