"""Calls of a pool whose actors are lost, come back, or never do; the actors are scripted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray import exceptions

from vlmserve.ray import pool as pools
from vlmserve.ray.pool import ActorPool, PoolLostError
from vlmserve_common.errors import BadRequestError, CheckpointError, EngineError


class Actor:
    """Answers "ask" with its name and the argument. script: errors to raise first, for calls of each method."""

    def __init__(self, name: str, description: str = "same", **script: list[Exception]) -> None:
        self.name, self.description, self.script = name, description, script
        self.asked: list[str] = []
        self.about = SimpleNamespace(remote=lambda: self._answer("about", (name, description)))
        self.ask = SimpleNamespace(remote=lambda what: self._answer("ask", f"{name} {what}"))

    async def _answer(self, method, answer):
        self.asked.append(method)
        await asyncio.sleep(0)
        if self.script.get(method):
            error = self.script[method].pop(0)
            if error is not None:
                raise error
        return answer


@pytest.fixture
def run(monkeypatch):
    """Runs a test's coroutine function with a started pool of these actors."""
    monkeypatch.setattr(pools, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(pools, "_STORE_FULL_S", 0.0)
    killed: list[Actor] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)

    def run(*actors, then, patience_s=60.0):
        handed_out = iter(actors)
        made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: next(handed_out)))
        monkeypatch.setattr(ray, "remote", lambda cls: made)

        async def whole():
            group = SimpleNamespace(bundle_count=len(actors))
            pool = ActorPool(object, {}, group, resources={"CPU": 1.0}, at_a_time=4, patience_s=patience_s)
            try:
                await pool.start()
                return await then(pool)
            finally:
                await pool.close()
                assert killed[-len(actors) :] == list(actors)

        return asyncio.run(whole())

    return run


def lost() -> Exception:
    return exceptions.ActorUnavailableError("the node is gone", b"0" * 16)


def of_method(cause: Exception) -> Exception:
    return exceptions.RayTaskError("ask", "a traceback of many\nlines", cause).as_instanceof_cause()


def test_the_actor_with_the_fewest_calls_gets_the_next(run):
    async def then(pool):
        assert pool.description == "same"
        return await asyncio.gather(*(pool.call("ask", str(number)) for number in range(4)))

    found = run(Actor("a"), Actor("b"), then=then)
    assert sorted(one[0] for one in found) == ["a", "a", "b", "b"]
    assert [one[2:] for one in found] == ["0", "1", "2", "3"]


def test_a_lost_actors_calls_go_to_others_and_it_may_come_back(run):
    back = Actor("a", ask=[lost()], about=[None, lost(), lost()])

    async def then(pool):
        first = await asyncio.gather(*(pool.call("ask", str(number)) for number in range(2)))
        while pool._returning:
            await asyncio.sleep(0)
        return first, await pool.call("ask", "later"), pool.notes()

    first, later, notes = run(back, Actor("b"), then=then)
    assert first == ["b 0", "b 1"]
    assert later == "a later"
    assert notes == ["a was lost, and 1 items under way on it were done again"]


def test_a_call_that_ends_each_actor_fails_alone(run):
    async def then(pool):
        with pytest.raises(EngineError, match="3 actors were lost while they worked on it"):
            await pool.call("ask", "poison")
        while pool._returning:
            await asyncio.sleep(0)
        return await pool.call("ask", "next")

    assert run(Actor("a", ask=[lost() for _ in range(3)]), then=then) == "a next"


def test_errors_of_the_method_are_the_callers(run):
    causes = [BadRequestError("too large", code="too_many_pixels"), ZeroDivisionError("oh")]

    async def then(pool):
        with pytest.raises(BadRequestError, match="too large") as caught:
            await pool.call("ask", "it")
        assert caught.value.code == "too_many_pixels"
        with pytest.raises(EngineError, match=r"^ZeroDivisionError: oh$"):
            await pool.call("ask", "it")
        return await pool.call("ask", "it"), pool.notes()

    assert run(Actor("a", ask=list(map(of_method, causes))), then=then) == ("a it", [])


def test_a_full_object_store_is_waited_for(run, caplog):
    full = [exceptions.ObjectStoreFullError("no room"), exceptions.OutOfDiskError("no disk")] * 3

    async def then(pool):
        return await pool.call("ask", "it")

    assert run(Actor("a", ask=full), then=then) == "a it"
    assert "waiting for room in Ray's object store" in caplog.text


def test_without_any_actor_the_pool_is_lost(run):
    gone = Actor("a", ask=[lost(), lost()], about=[None, *(lost() for _ in range(9999))])

    async def then(pool):
        calls = [asyncio.create_task(pool.call("ask", "it")) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = run(gone, then=then, patience_s=0.01)
    for error in (first, second):
        assert isinstance(error, PoolLostError)
        assert str(error) == "no actor has worked for 0.01 s: a: its process or node is gone"


def test_what_keeps_an_actor_from_starting_is_told(run):
    async def then(pool):
        raise AssertionError

    with pytest.raises(EngineError, match=r"^an actor cannot start: host b: there is no checkpoint$"):
        run(Actor("a"), Actor("b", about=[of_method(CheckpointError("host b: there is no checkpoint"))]), then=then)
    with pytest.raises(EngineError, match="a and b would answer differently: weights"):
        run(Actor("a"), Actor("b", "other"), then=then)


def test_an_actor_that_comes_back_different_is_not_used(run):
    changed = Actor("a", ask=[lost()])

    async def then(pool):
        pool_before = await pool.call("ask", "1"), await pool.call("ask", "2")
        return pool_before, {await pool.call("ask", str(number)) for number in range(6)}

    changing = iter(["same", *["other"] * 9])
    changed.about.remote = lambda: changed._answer("about", ("a", next(changing)))
    _, found = run(changed, Actor("b"), then=then)
    assert all(one.startswith("b") for one in found)
