"""Grammars are compiled once for all who wait, kept within a limit, and those of nobody are not begun."""

from __future__ import annotations

import threading

import pytest

from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar.grammar_queue import GrammarQueue
from vlmserve_common.errors import BadRequestError, EngineError

WAIT_S = 30


class FakeCompiled:
    num_bytes = 1000

    def __init__(self, closed) -> None:
        self.failure = ""
        self._closed = closed

    def close(self, why: str) -> None:
        assert not self.failure
        self.failure = why
        self._closed()


class FakeCompiler:
    """Says what it is at, and goes on when it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_go_on = threading.Semaphore(0)
        self.closed = False
        self.broken = False

    def compile(self, spec, *, closed):
        self.begun.append(spec.text)
        assert self.may_go_on.acquire(timeout=WAIT_S)
        if self.broken:
            raise EngineError("the process cannot start")
        if spec.text == "bad":
            raise BadRequestError("no")
        return FakeCompiled(closed)

    def close(self) -> None:
        self.closed = True
        self.may_go_on.release(1000)


@pytest.fixture
def compiler():
    return FakeCompiler()


def test_a_queue_that_nobody_used_ends():
    compiler = FakeCompiler()
    GrammarQueue(compiler, cache_bytes=1).close()
    assert compiler.closed


@pytest.fixture
def grammars(compiler):
    grammars = GrammarQueue(compiler, cache_bytes=2100, most=3, workers=1)
    yield grammars
    grammars.close()
    assert compiler.closed


def spec(text: str, **more) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text, **more)


def compiled(grammars, compiler, text):
    future = grammars.get(spec(text))
    compiler.may_go_on.release()
    future.exception(timeout=WAIT_S)
    grammars.release(spec(text))
    return future


def test_equal_ones_are_compiled_once(grammars, compiler):
    first, second = grammars.get(spec("a")), grammars.get(spec("a", param="guided_regex"))
    assert first is second
    other = grammars.get(spec("a", strict=False))
    assert other is not first
    compiler.may_go_on.release(2)
    assert first.result(WAIT_S) is not other.result(WAIT_S)
    assert grammars.get(spec("a")) is first
    assert compiler.begun == ["a", "a"]


def test_those_used_last_are_kept(grammars, compiler):
    for text in ("a", "b"):
        compiled(grammars, compiler, text)
    grammars.get(spec("a"))
    grammars.release(spec("a"))
    compiled(grammars, compiler, "c")
    assert grammars.cached_bytes <= 2100
    grammars.get(spec("a"))
    assert compiler.begun == ["a", "b", "c"]
    compiled(grammars, compiler, "b")
    assert compiler.begun == ["a", "b", "c", "b"]


def test_more_than_there_is_room_for_wait_until_one_is_given_back(grammars, compiler):
    compiler.may_go_on.release(10)
    waiting = [grammars.get(spec(text)) for text in "abcd"]
    for future in waiting[:3]:
        assert future.result(WAIT_S)
    assert compiler.begun == ["a", "b", "c"]
    grammars.release(spec("b"))
    assert waiting[3].result(WAIT_S)
    assert compiler.begun == ["a", "b", "c", "d"]
    assert [bool(future.result().failure) for future in waiting] == [False, True, False, False]


def test_one_whose_process_has_ended_is_compiled_again(grammars, compiler):
    compiler.may_go_on.release(10)
    first = grammars.get(spec("a")).result(WAIT_S)
    first.close("it takes too long")
    grammars.release(spec("a"))
    assert grammars.get(spec("a")).result(WAIT_S) is not first
    for _ in range(3):  # the room of the first one is free again
        assert grammars.get(spec(f"{_}") if _ < 2 else spec("a")).result(WAIT_S)


def test_refusals_are_kept_and_accidents_are_not(grammars, compiler):
    for _ in range(2):
        grammars.get(spec("bad"))
        compiler.may_go_on.release()
        with pytest.raises(BadRequestError):
            grammars.get(spec("bad")).result(WAIT_S)
    assert compiler.begun == ["bad"]
    compiler.may_go_on.acquire()
    compiler.broken = True
    with pytest.raises(EngineError):
        compiled(grammars, compiler, "a").result()
    compiler.broken = False
    assert compiled(grammars, compiler, "a").result()


def test_who_saw_an_accident_lets_go_of_nothing_that_others_wait_for(grammars, compiler):
    compiler.broken = True
    first = grammars.get(spec("a"))
    compiler.may_go_on.release()
    assert isinstance(first.exception(WAIT_S), EngineError)
    compiler.broken = False
    grammars.get(spec("b"))
    second = grammars.get(spec("a"))
    grammars.release(spec("a"))
    assert not second.cancelled()
    compiler.may_go_on.release(2)
    assert second.result(WAIT_S)


def test_what_nobody_waits_for_any_more_is_not_begun(grammars, compiler):
    grammars.get(spec("a"))
    for _ in range(2):
        waiting = grammars.get(spec("b"))
    grammars.release(spec("b"))
    assert not waiting.cancelled()
    grammars.release(spec("b"))
    assert waiting.cancelled()
    compiler.may_go_on.release()
    assert compiled(grammars, compiler, "c").result()
    assert compiler.begun == ["a", "c"]


def test_clients_take_turns_and_leave_a_thread_to_each_other(compiler):
    grammars = GrammarQueue(compiler, cache_bytes=2100, workers=3)
    begun = threading.Semaphore(0)
    compile_now = compiler.compile

    def told(spec, *, closed):
        begun.release()
        return compile_now(spec, closed=closed)

    compiler.compile = told
    try:
        many = [grammars.get(spec(f"many {number}"), "one") for number in range(4)]
        for _ in range(2):
            assert begun.acquire(timeout=WAIT_S)
        few = [grammars.get(spec(f"few {number}"), "other") for number in range(2)]
        assert begun.acquire(timeout=WAIT_S)
        assert set(compiler.begun) == {"many 0", "many 1", "few 0"}
        compiler.may_go_on.release(10)
        assert all(future.result(WAIT_S) for future in many + few)
        assert set(compiler.begun[3:]) == {"many 2", "many 3", "few 1"}
    finally:
        grammars.close()
