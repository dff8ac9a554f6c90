"""The registry of adapters: names, memory, and requests that use them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from vlmserve.frontend.adapters import AdapterRegistry
from vlmserve.ipc.control_messages import AdapterLoaded, EngineState, LoadAdapterReq, UnloadAdapterReq
from vlmserve_common.checkpoint.adapter_ref import AdapterRef
from vlmserve_common.errors import BadRequestError


class FakeEngine:
    """An engine with adapters in memory. files: the digest of what lies in each folder now."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.here: list[str] = []

    async def ask(self, question, kind):
        await asyncio.sleep(0)
        match question:
            case LoadAdapterReq(path=path):
                if path not in self.files:
                    raise BadRequestError(f"{path} is no folder")
                digest = self.files[path]
                self.here += [] if digest in self.here else [digest]
                return AdapterLoaded(adapter=AdapterRef(digest=digest, path=path, tower=False))
            case UnloadAdapterReq(digest=digest):
                self.here.remove(digest)
                return EngineState(paused=False, num_running_reqs=0, num_waiting_reqs=0)


def registry(engine: FakeEngine, *, most: int = 2, folder: Path | None = None) -> AdapterRegistry:
    return AdapterRegistry(engine.ask, base="base", most=most, folder=folder, enabled=True, clock=lambda: 0.0)


def run(work) -> None:
    asyncio.run(work)


def test_the_adapter_used_longest_ago_leaves_memory_and_comes_back():
    async def work() -> None:
        engine = FakeEngine()
        engine.files = {f"/{name}": name * 3 for name in "abcd"}
        adapters = registry(engine)
        for name in "abc":
            await adapters.load(name, f"/{name}")
        assert engine.here == ["bbb", "ccc"]
        found = adapters.find("a")
        assert found is not None
        async with adapters.used(found.ref):
            assert engine.here == ["ccc", "aaa"]
            for name in "d":  # the one in use stays
                await adapters.load(name, f"/{name}")
            assert set(engine.here) == {"aaa", "ddd"}
        assert [one.name for one in adapters.all()] == ["a", "b", "c", "d"]
        engine.files["/b"] = "other"
        found = adapters.find("b")
        assert found is not None
        with pytest.raises(BadRequestError, match="has changed since"):
            async with adapters.used(found.ref):
                pass
        assert "other" not in engine.here

    run(work())


def test_adapters_that_were_too_many_while_in_use_leave_memory_afterwards():
    async def work() -> None:
        engine = FakeEngine()
        engine.files = {f"/{name}": name for name in "ab"}
        adapters = registry(engine, most=1)
        first, second = [await adapters.load(name, f"/{name}") for name in "ab"]
        async with adapters.used(second.ref), adapters.used(first.ref):
            assert set(engine.here) == {"a", "b"}
        assert engine.here == ["a"], "the one used last"

    run(work())


def test_a_pinned_adapter_stays_and_leaves_a_place():
    async def work() -> None:
        engine = FakeEngine()
        engine.files = {f"/{name}": name for name in "abc"}
        adapters = registry(engine)
        await adapters.load("a", "/a", pinned=True)
        for name in "bc":
            await adapters.load(name, f"/{name}")
        assert engine.here == ["a", "c"]
        with pytest.raises(BadRequestError, match="--max-loaded-loras"):
            await adapters.load("d", "/c", pinned=True)

    run(work())


def test_an_unloaded_name_is_gone_at_once_and_its_adapter_when_nobody_uses_it():
    async def work() -> None:
        engine = FakeEngine()
        engine.files = {"/a": "same", "/b": "same", "/c": "other"}
        adapters = registry(engine)
        first = await adapters.load("a", "/a")
        async with adapters.used(first.ref):
            await adapters.unload("a")
            assert adapters.find("a") is None
            assert engine.here == ["same"]
            await adapters.load("a", "/c")
        assert engine.here == ["other"]
        await adapters.load("b", "/b")
        await adapters.load("again", "/a")  # the same files under two names
        await adapters.unload("b")
        assert set(engine.here) == {"same", "other"}
        await adapters.unload("again")
        assert engine.here == ["other"]

    run(work())


def test_names_and_folders_are_checked(tmp_path):
    async def work() -> None:
        engine = FakeEngine()
        engine.files = {str(tmp_path / "in" / "a"): "a"}
        adapters = registry(engine, folder=tmp_path / "in")
        for name, path, reason in (
            ("base", tmp_path / "in" / "a", "as the model here is called"),
            ("a", tmp_path / "out" / "a", "--allowed-lora-path"),
            ("a", tmp_path / "in" / ".." / "out", "--allowed-lora-path"),
            ("a", tmp_path / "in" / "none", "is no folder"),
            ("a", "in\0side", "embedded null"),
        ):
            with pytest.raises(BadRequestError, match=reason):
                await adapters.load(name, str(path))
        await adapters.load("a", str(tmp_path / "in" / "a"))
        with pytest.raises(BadRequestError, match="as an adapter here is called"):
            await adapters.load("a", str(tmp_path / "in" / "a"))
        with pytest.raises(BadRequestError, match="no adapter 'b'"):
            await adapters.unload("b")

    run(work())
