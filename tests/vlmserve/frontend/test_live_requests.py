"""Requests that end before their time, at every stage; ids; and when to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from tests.vlmserve.frontend.test_tokenizer_manager import PICTURE, STOP, House, ask, run
from vlmserve.frontend.live_requests import FinishRate, LiveRequest, RequestAbortedError, RequestTimeoutError
from vlmserve.frontend.requests import GenerateReqInput, WarmupInput
from vlmserve.ipc.messages import AbortReq, TokenizedGenerateReqInput
from vlmserve_common.errors import BadRequestError


async def answer(house: House, request: GenerateReqInput) -> list[str]:
    """All its texts."""
    return [item.output.text async for item in house.manager.generate(request)]


class Timers:
    """Keeps the calls for later of the running loop, until the test lets their time pass."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []
        asyncio.get_running_loop().call_later = self._note  # type: ignore[method-assign]

    def _note(self, seconds: float, call: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        self.due.append((seconds, lambda: call(*args)))
        return asyncio.get_running_loop().call_at(float("inf"), call)

    def let_pass(self) -> float:
        [(seconds, call)] = self.due
        call()
        return seconds


@pytest.mark.parametrize("by_setting", [True, False])
def test_time_is_over_while_media_are_loaded(by_setting: bool) -> None:
    async def scenario(house: House) -> None:
        timers = Timers()
        house.media.gate.clear()
        request = ask(content=[PICTURE], timeout_s=100.0 if by_setting else 7.5)
        first = asyncio.ensure_future(anext(house.manager.generate(request)))
        await house.media.loading.wait()
        assert timers.let_pass() == 7.5
        with pytest.raises(RequestTimeoutError, match=r"within 7\.5 s") as caught:
            await first
        assert ("--request-timeout-s" in str(caught.value)) == by_setting
        assert house.media.cancelled == 1
        assert house.sent == []

    run(scenario, request_timeout_s=7.5 if by_setting else 100.0)


@pytest.mark.parametrize("begun", [True, False])
def test_time_is_over_at_the_scheduler(begun: bool) -> None:
    async def scenario(house: House) -> None:
        timers = Timers()
        async with aclosing(house.manager.generate(ask(n=2, timeout_s=7.5))) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            await house.arrived.wait()
            if begun:
                house.output("r-0")
                await first
                first = asyncio.ensure_future(anext(outputs))
                await asyncio.sleep(0)
            timers.let_pass()
            with pytest.raises(RequestTimeoutError):
                await first
        assert house.of(AbortReq) == [AbortReq(rid="r-0"), AbortReq(rid="r-1")]
        assert [stats.finish for stats in house.stats] == ["timeout", "timeout"]

    run(scenario)


def test_of_two_with_one_id_the_second_is_refused() -> None:
    async def scenario(house: House) -> None:
        first = asyncio.ensure_future(answer(house, ask("mine", group="own-1")))
        await house.arrived.wait()
        with pytest.raises(BadRequestError, match="'mine' already") as caught:
            await answer(house, ask("mine", group="own-2"))
        assert (caught.value.status, caught.value.param) == (409, "rid")
        house.output("own-1-0", finish=STOP)
        await first
        # what is still on its way for the first one is not the next one's, who may call itself the same
        house.arrived.clear()
        again = asyncio.ensure_future(answer(house, ask("mine", group="own-3")))
        await house.arrived.wait()
        assert [message.rid for message in house.of(TokenizedGenerateReqInput)] == ["own-1-0", "own-3-0"]
        house.output("own-1-0", "late")
        house.output("own-3-0", "right", STOP)
        assert await again == ["right"]

    run(scenario)


def test_slots_do_not_wait_for_a_client_that_does_not_read() -> None:
    async def scenario(house: House) -> None:
        async with aclosing(house.manager.generate(ask())) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            await house.arrived.wait()
            house.output("r-0")
            await first
            [ended] = house.manager.abort("r")
            assert ended.rids == ["r-0"]
            assert house.of(AbortReq) == [AbortReq(rid="r-0")]
            house.manager.abort("r")
            with pytest.raises(RequestAbortedError):
                await anext(outputs)
        assert len(house.of(AbortReq)) == 1
        assert house.manager.abort("r") == []

    run(scenario)


def test_all_are_aborted_wherever_they_are() -> None:
    async def scenario(house: House) -> None:
        house.media.gate.clear()
        loading = asyncio.ensure_future(anext(house.manager.generate(ask("loading", content=[PICTURE]))))
        await house.media.loading.wait()
        house.media.media_of = lambda *_: [1]
        warmup = asyncio.ensure_future(house.manager.warm_up(WarmupInput(request_id="warmup", messages=[])))
        running = asyncio.ensure_future(anext(house.manager.generate(ask("running"))))
        await house.arrived.wait()
        assert {one.request_id for one in house.manager.abort(None)} == {"loading", "warmup", "running"}
        for request in (loading, warmup, running):
            with pytest.raises(RequestAbortedError):
                await request
        assert house.of(AbortReq) == [AbortReq(rid="running-0")]

    run(scenario)


def test_the_time_to_come_again_follows_from_how_fast_answers_end() -> None:
    async def scenario(house: House) -> None:
        waiting = []
        for name in ("long", "short0", "short1", "short2"):
            waiting.append(asyncio.ensure_future(answer(house, ask(name))))
            await house.arrived.wait()
            house.arrived.clear()
        for number in range(3):
            house.now += 3.0
            house.output(f"short{number}-0", finish=STOP)
            await waiting[number + 1]
        assert house.manager.retry_after_s() == 3
        house.output("long-0", finish=STOP)
        await waiting[0]

    run(scenario)


def test_an_end_that_comes_too_late_to_interrupt_the_work_ends_the_request_all_the_same() -> None:
    async def scenario() -> None:
        request: LiveRequest[str] = LiveRequest(request_id="a", n=1, started=0.0)

        async def work() -> None:
            await asyncio.sleep(0)
            request.end(RequestAbortedError("by an operator"))  # the work is over before it can be cancelled

        with pytest.raises(RequestAbortedError, match="by an operator"):
            await request.interruptible(work())

    asyncio.run(scenario())


def test_rates() -> None:
    rate = FinishRate()
    rate.begin(1000.0)
    assert rate.seconds_for(1, 1000.0) == 1
    assert rate.seconds_for(1, 1007.5) == 8, "none has ended: as long again"
    for second in range(200):
        rate.note(1000.0 + second / 10)
    assert rate.seconds_for(1, 1020.0) == 1
    assert rate.seconds_for(100, 1020.0) == 11, "the last 64 took 6.4 s and one"
    rate.begin(5000.0)
    assert rate.seconds_for(1, 5000.0) == 1, "a time with nothing to do is no slow one"
    assert rate.seconds_for(1, 5010.0) == 10, "and nothing has ended since"
    assert rate.seconds_for(1, 1e9) == 3600
