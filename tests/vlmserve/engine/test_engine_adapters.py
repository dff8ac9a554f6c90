"""Adapters of an engine: all ranks have one or none has, and those that other servers name come and go."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlmserve.engine.adapters import EngineAdapters, admission, obey_adapter_order
from vlmserve.executor.adapter_order import LoadAdapterOrder, UnloadAdapterOrder
from vlmserve_common.checkpoint.adapter_ref import AdapterRef
from vlmserve_common.errors import CheckpointError


@dataclass
class Store:
    """files: the digest of what lies in each folder now."""

    files: dict[str, str]
    here: list[str] = field(default_factory=list)

    def load(self, folder: Path) -> tuple[AdapterRef, tuple[str, ...]]:
        if str(folder) not in self.files:
            raise CheckpointError(f"{folder} is no folder")
        ref = AdapterRef(digest=self.files[str(folder)], path=str(folder), tower=False)
        self.here += [] if ref.digest in self.here else [ref.digest]
        return ref, ()

    def get(self, ref: AdapterRef) -> None:
        if self.files.get(ref.path) != ref.digest:
            raise CheckpointError(f"{ref.path} has changed")
        self.here.append(ref.digest)

    def unload(self, digest: str) -> None:
        if digest in self.here:
            self.here.remove(digest)


class Engine:
    """A loop, and two ranks. other: the second one's files. in_use: digests of requests."""

    def __init__(self, other: dict[str, str] | None = None, **more: Any) -> None:
        self.store = Store({f"/{name}": name for name in "abcd"})
        self.other = Store(dict(self.store.files) if other is None else other)
        self.device, self.in_use = self, set[str]()
        self._failure = ""
        self.adapters = EngineAdapters(self.store, self, ranks=self, tell=self.obey, **more)  # type: ignore[arg-type]
        self.shard = SimpleNamespace(rank=1)

    def submit(self, work: Any, *args: Any) -> Any:
        made = work(*args)
        return SimpleNamespace(result=lambda: made)

    def adapters_in_use(self) -> set[str]:
        return self.in_use

    def obey(self, order: Any) -> None:
        assert isinstance(order, LoadAdapterOrder | UnloadAdapterOrder)
        note = SimpleNamespace(shard=self.shard, failure=lambda reason: setattr(self, "_failure", reason))
        obey_adapter_order(self.other, order, note)  # type: ignore[arg-type]

    def failure(self, own: str) -> str:
        found, self._failure = self._failure or own, ""
        return found

    @property
    def here(self) -> list[str]:
        assert sorted(self.store.here) == sorted(self.other.here)
        return sorted(self.store.here)


def ref(name: str, path: str = "") -> AdapterRef:
    return AdapterRef(digest=name, path=path or f"/{name}", tower=False)


def test_a_rank_that_fails_leaves_the_adapter_nowhere() -> None:
    engine = Engine({"/a": "a", "/b": "something else"})
    assert engine.adapters.load("/a").is_new
    for path, reason in (("/b", "rank 1: /b has changed"), ("/c", "rank 1: /c has changed"), ("/e", "/e is no folder")):
        with pytest.raises(CheckpointError, match=reason):
            engine.adapters.load(path)
        assert engine.here == ["a"]
    engine.store.files["/again"] = "a"
    assert not engine.adapters.load("/again").is_new
    assert engine.here == ["a"]


def test_what_other_servers_name_comes_and_goes() -> None:
    engine = Engine(most=2)
    engine.adapters.load("/a")
    for name in "abc":
        engine.adapters.bring(ref(name))
    assert engine.here == ["a", "b", "c"], "one has a name here"
    engine.in_use = {"b"}
    engine.adapters.bring(ref("d"))
    assert engine.here == ["a", "b", "c", "d"], "a request has it"
    engine.in_use = set()
    engine.adapters.bring(ref("c"))
    engine.adapters.bring(ref("b"))
    assert engine.here == ["a", "b", "c"], "the one used longest ago has gone"
    engine.adapters.unload("a")
    assert engine.here == ["b", "c"]
    engine.adapters.load("/b")
    engine.adapters.unload("b")
    assert engine.here == ["b", "c"], "others still name it"


def test_why_an_adapter_cannot_come(tmp_path: Path) -> None:
    engine = Engine(folder=str(tmp_path))
    engine.store.files |= {str(tmp_path / "x"): "x", str(tmp_path / "y"): "other"}
    engine.other.files |= engine.store.files
    admit = admission(engine.adapters)

    def reason(adapter: AdapterRef | None) -> str:
        found = admit(SimpleNamespace(adapter=adapter))  # type: ignore[arg-type]
        assert found is None or found.status == 503, "so that the other server does it"
        return "" if found is None else found.message or ""

    assert reason(None) == reason(ref("x", str(tmp_path / "x"))) == ""
    assert "is not below" in reason(ref("a"))
    assert "is not below" in reason(ref("a", f"{tmp_path}/../a"))
    assert "has other files here" in reason(ref("y", str(tmp_path / "y")))
    assert "is no folder" in reason(ref("z", str(tmp_path / "z")))
    assert engine.here == ["x"]
    admit = admission(None)
    assert reason(None) == ""
    assert "--enable-lora" in reason(ref("a"))
