"""TokenizerManager on its own: order of things, cancellation, failure, figures."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from types import SimpleNamespace

import numpy as np
import pytest

from tests.vlmserve.tiny_tokenizer import TEMPLATE, make_tokenizer
from vlmserve.frontend.chat_template import ChatTemplate
from vlmserve.frontend.media import ExpandedPrompt
from vlmserve.frontend.request_builder import (
    ChatPrompt,
    GenerateReqInput,
    RequestBuilder,
    RequestLimits,
    TextPrompt,
)
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTextOutput,
    BatchTokenizedGenerateReqInput,
    FinishReason,
    RequestsLost,
    SamplingParams,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer
from vlmserve_common.errors import BadRequestError, EngineError, EngineUnavailableError

TOKENIZER = TextTokenizer(make_tokenizer())
PICTURE = {"type": "image_url", "image_url": {"url": "u"}}


class FakeMedia:
    """Every picture is one token; `gate` holds loading up."""

    sees, pads = True, ()

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.loading = asyncio.Event()
        self.cancelled = 0

    async def load(self, images, *, client="", tenant="", fetched=lambda: None):
        self.loading.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        fetched()
        return [SimpleNamespace(source=image.source, parts=()) for image in images]

    def check(self, media):
        pass

    def report(self, media, processed):
        return tuple(SimpleNamespace(kind="image", patches=4, pruned_tokens=0) for _ in processed)

    def process(self, prompt_ids, images):
        return ExpandedPrompt(input_ids=np.asarray(prompt_ids, np.int64), mm_inputs=None)


def make_builder(media: FakeMedia) -> RequestBuilder:
    limits = RequestLimits(max_model_len=100, vocab_size=512)
    return RequestBuilder(tokenizer=TOKENIZER, template=ChatTemplate(TEMPLATE), expander=media, limits=limits)


class House:
    """A manager, what it sent, and what it reported."""

    def __init__(self, **options) -> None:
        self.sent = []
        self.stats = []
        self.media = FakeMedia()
        self.now = 0.0
        self.arrived = asyncio.Event()
        self.manager = TokenizerManager(
            builder=make_builder(self.media),
            media=self.media,
            send=self.send,
            observe=self.stats.append,
            clock=lambda: self.now,
            **{"max_pending": 4, **options},
        )

    def send(self, message) -> None:
        self.sent += message.requests if isinstance(message, BatchTokenizedGenerateReqInput) else [message]
        self.arrived.set()

    def of(self, kind) -> list:
        return [message for message in self.sent if isinstance(message, kind)]

    def output(self, rid: str, text: str = "x", finish: FinishReason | None = None, done: int = 1) -> None:
        output = TokenOutput(
            rid=rid,
            text=text,
            token_ids=(1,),
            finish_reason=finish,
            prompt_tokens=5,
            completion_tokens=done,
            cached_tokens=2,
        )
        self.manager.handle(BatchTextOutput(outputs=(output,)))


def run(scenario, **options) -> None:
    """Run a scenario with a house; nothing may be left in it, and nothing may hang."""

    async def whole() -> None:
        house = House(**options)
        try:
            async with asyncio.timeout(20):
                await scenario(house)
            assert house.manager.num_pending == 0
        finally:
            house.manager.close()

    asyncio.run(whole())


def ask(request_id: str = "r", n: int = 1, content="hi", **fields) -> GenerateReqInput:
    prompt = ChatPrompt(messages=[{"role": "user", "content": content}])
    return GenerateReqInput(request_id=request_id, prompt=prompt, n=n, **fields)


STOP = FinishReason(type="stop", matched=3)


def test_outputs_come_as_they_are_until_all_choices_end():
    async def scenario(house: House) -> None:
        async with aclosing(house.manager.generate(ask(n=2))) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            await house.arrived.wait()
            assert [m.rid for m in house.of(TokenizedGenerateReqInput)] == ["r-0", "r-1"]
            assert house.manager.num_pending == 2
            house.now = 1.0
            house.output("r-1", "a")
            house.now = 4.0
            house.output("r-0", "b", STOP, done=3)
            house.output("unknown", "c", STOP)
            house.output("r-1", "d", STOP, done=4)
            seen = [await first, *[item async for item in outputs]]
        assert [(item.index, item.output.text) for item in seen] == [(1, "a"), (0, "b"), (1, "d")]
        assert house.of(AbortReq) == []
        choice0, choice1 = house.stats
        tokens = [(one.prompt_tokens, one.cached_tokens, one.completion_tokens) for one in house.stats]
        assert (choice0.finish, tokens) == ("stop", [(5, 2, 3), (0, 0, 4)])
        assert (choice1.timings.first_token_s, choice1.timings.total_s) == (1.0, 4.0)
        assert choice1.seconds_per_output_token == 1.0

    run(scenario)


def test_a_request_of_which_a_message_is_lost_fails_and_is_aborted():
    async def scenario(house: House) -> None:
        lost, other = (house.manager.generate(ask(name, n=2)) for name in ("lost", "other"))
        waiting = [asyncio.ensure_future(anext(outputs)) for outputs in (lost, other)]
        while len(house.of(TokenizedGenerateReqInput)) < 4:
            await house.arrived.wait()
            house.arrived.clear()
        house.output("other-0", "a")
        assert (await waiting[1]).output.text == "a"
        house.manager.handle(RequestsLost(rids=("unknown", "lost-1"), message="lost on its way"))
        assert house.of(AbortReq) == [AbortReq(rid="lost-1")]
        with pytest.raises(EngineError, match=r"^lost on its way$"):
            await waiting[0]
        assert house.of(AbortReq) == [AbortReq(rid="lost-1"), AbortReq(rid="lost-0")]
        house.manager.handle(RequestsLost(rids=("lost-0", "lost-1"), message="again"))
        assert len(house.of(AbortReq)) == 2, "nobody is left to hear of it"
        for rid in ("other-0", "other-1"):
            house.output(rid, finish=STOP)
        assert len([output async for output in other]) == 2
        assert [choice.finish for choice in house.stats] == ["error", "abort", "stop", "stop"]

    run(scenario)


class Copying:
    """Stands for the sender's first half: holds a thread until it is let go, and counts what became of messages."""

    def __init__(self) -> None:
        self.house: House | None = None
        self.arrived, self.go_on = threading.Semaphore(0), threading.Event()
        self.threads = []
        self.discarded = 0

    def __call__(self, message):
        self.threads.append(threading.get_ident())
        self.arrived.release()
        assert self.go_on.wait(20)
        self.message = message
        return self

    def send(self) -> None:
        assert threading.get_ident() not in self.threads
        self.house.send(self.message)

    def discard(self) -> None:
        self.discarded += 1

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.arrived.acquire, timeout=20)


def test_large_arrays_are_copied_beside_the_event_loop():
    copying = Copying()

    async def scenario(house: House) -> None:
        copying.house = house

        async def all_outputs() -> list:
            return [output async for output in house.manager.generate(ask(content=[PICTURE], n=2))]

        task = asyncio.ensure_future(all_outputs())
        await copying.begun()
        assert house.sent == []
        copying.go_on.set()
        await house.arrived.wait()
        assert [message.rid for message in house.sent] == ["r-0", "r-1"]
        for rid in ("r-0", "r-1"):
            house.output(rid, finish=STOP)
        assert len(await task) == 2
        assert copying.discarded == 0

    run(scenario, prepare=copying)


@pytest.mark.parametrize("given_up_by", ["client", "engine"])
def test_what_was_copied_for_nobody_is_freed(given_up_by):
    copying = Copying()

    async def scenario(house: House) -> None:
        task = asyncio.ensure_future(anext(house.manager.generate(ask(content=[PICTURE]))))
        await copying.begun()
        if given_up_by == "client":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            copying.go_on.set()
            while not copying.discarded:
                await asyncio.sleep(0)
        else:
            house.manager.fail("the scheduler died")
            copying.go_on.set()
            with pytest.raises(EngineUnavailableError):
                await task
        assert copying.discarded == 1
        assert house.sent == []

    run(scenario, prepare=copying)


def test_a_dead_engine_fails_everybody_now():
    async def scenario(house: House) -> None:
        house.media.gate.clear()
        early = asyncio.ensure_future(anext(house.manager.generate(ask("early", content=[PICTURE]))))
        await house.media.loading.wait()
        running = asyncio.ensure_future(anext(house.manager.generate(ask("running"))))
        await house.arrived.wait()
        house.manager.fail("the scheduler died")
        house.manager.fail("the scheduler died")
        house.media.gate.set()
        for task in (early, running):
            with pytest.raises(EngineUnavailableError, match="the scheduler died"):
                await task
        with pytest.raises(EngineUnavailableError):
            await anext(house.manager.generate(ask("later")))
        assert [m.rid for m in house.of(TokenizedGenerateReqInput)] == ["running-0"]
        assert house.of(AbortReq) == []
        assert [s.finish for s in house.stats] == ["error"]

    run(scenario)


@pytest.mark.parametrize("wanted", [None, 1])
def test_a_prompt_must_leave_room_for_one_token(wanted):
    builder = make_builder(FakeMedia())

    def build(length: int) -> TokenizedGenerateReqInput:
        prompt = TextPrompt(text="<|im_start|>" * length)
        params = SamplingParams(max_new_tokens=wanted)
        return builder.build(
            builder.tokenize(GenerateReqInput(request_id="r", prompt=prompt, sampling_params=params)), []
        )[0]

    assert build(99).sampling_params.max_new_tokens == 1
    for length, code in ((100, "context_length_exceeded"), (0, None)):
        with pytest.raises(BadRequestError) as caught:
            build(length)
        assert (caught.value.code, caught.value.param) == (code, "messages")
