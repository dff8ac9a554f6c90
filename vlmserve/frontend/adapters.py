"""The LoRA adapters that requests may name: which there are, which are in the engine's memory, and who uses them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from vlmserve.frontend.requests import GenerateReqInput
from vlmserve.ipc.control_messages import (
    AdapterLoaded,
    ControlRequest,
    EngineState,
    LoadAdapterReq,
    UnloadAdapterReq,
)
from vlmserve_common.checkpoint.adapter_ref import AdapterRef, check_place
from vlmserve_common.errors import BadRequestError, CheckpointError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Ask(Protocol):
    """Asks all engines for a result of a kind. Raises BadRequestError with their reason, or EngineUnavailableError."""

    async def __call__(self, question: ControlRequest, kind: type[_T], /) -> _T:
        """Ask a question."""


@dataclass(frozen=True, kw_only=True)
class NamedAdapter:
    """An adapter under its name. created: when it was loaded, in seconds since 1970. pinned: it stays in memory.
    warnings: for answers."""

    name: str
    ref: AdapterRef
    created: int
    pinned: bool = False
    warnings: tuple[str, ...] = ()


class AdapterRegistry:
    """The adapters of a server, in its event loop. Changes wait for each other.

    base: the model's own name, which no adapter may have. most: adapters in memory; those used
    longest ago go if there are more. folder: where adapters must lie; None: anywhere. enabled: whether there may be
    adapters. clock: seconds since 1970.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        base: str,
        most: int,
        folder: str | None,
        enabled: bool,
        clock: Callable[[], float],
    ) -> None:
        self._ask, self._base, self._most, self._folder, self._clock = ask, base, most, folder, clock
        self.enabled = enabled
        self._named: dict[str, NamedAdapter] = {}
        self._resident: dict[str, AdapterRef] = {}  # by digest, the one used last at the end
        self._users: Counter[str] = Counter()  # requests by digest
        self._changes = asyncio.Lock()

    def all(self) -> list[NamedAdapter]:
        """Return all adapters, in the order in which they were loaded."""
        return list(self._named.values())

    def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter of a name, if there is one."""
        return self._named.get(name)

    def adapted(self, request: GenerateReqInput, name: str | None) -> GenerateReqInput:
        """Return a request that an adapter answers; None: the model alone. Raises BadRequestError (404)."""
        if name is None:
            return request
        found = self._named.get(name)
        if found is None:
            known = ", ".join(self._named) or "none"
            raise BadRequestError(f"there is no adapter {name!r}; loaded are: {known}", param="lora", status=404)
        return replace(request, adapter=found.ref, warnings=(*request.warnings, *found.warnings))

    async def load(self, name: str, path: str, *, pinned: bool = False, trusted: bool = False) -> NamedAdapter:
        """Load an adapter under a new name. BadRequestError says why that is impossible; then nothing has changed.
        trusted: it may lie anywhere."""
        async with self._changes:
            self._check(name, path, trusted=trusted)
            if pinned and sum(one.pinned for one in self._named.values()) + 1 >= self._most:
                raise BadRequestError(
                    f"pinned adapters would leave no place for others among {self._most} (setting --max-loaded-loras)",
                    param="pinned",
                )
            adapter = self.adopt(name, await self._load(path), pinned=pinned)
            await self._make_room()
            log.info("adapter %s: %s, digest %s", name, path, adapter.ref.digest)
            return adapter

    def adopt(self, name: str, loaded: AdapterLoaded, *, pinned: bool = False) -> NamedAdapter:
        """Name an adapter that the engine has loaded."""
        self._resident[loaded.adapter.digest] = loaded.adapter
        self._named[name] = NamedAdapter(
            name=name,
            ref=loaded.adapter,
            created=int(self._clock()),
            pinned=pinned,
            warnings=loaded.warnings(name),
        )
        return self._named[name]

    async def unload(self, name: str) -> NamedAdapter:
        """Forget a name at once. The adapter leaves memory when its last request has ended. BadRequestError (404)."""
        if name not in self._named:
            raise BadRequestError(
                f"there is no adapter {name!r}", param="lora_name", status=404, code="model_not_found"
            )
        adapter = self._named.pop(name)
        async with self._changes:
            await self._drop_unnamed()
        return adapter

    @asynccontextmanager
    async def used(self, ref: AdapterRef | None) -> AsyncIterator[None]:
        """Keep an adapter in memory; it is loaded again if it has gone. BadRequestError if that fails."""
        if ref is None:
            yield
            return
        self._users[ref.digest] += 1
        try:
            if ref.digest not in self._resident:
                async with self._changes:
                    await self._load_again(ref)
            self._resident[ref.digest] = self._resident.pop(ref.digest)
            yield
        finally:
            self._users[ref.digest] -= 1
            if not self._users[ref.digest]:
                del self._users[ref.digest]
                is_named = any(one.ref.digest == ref.digest for one in self._named.values())
                if not is_named or len(self._resident) > self._most:
                    async with self._changes:
                        await self._drop_unnamed()
                        await self._make_room()

    def _check(self, name: str, path: str, *, trusted: bool) -> None:
        if not self.enabled:
            raise BadRequestError("this server takes no LoRA adapters (setting --enable-lora)", status=409)
        if name == self._base or name in self._named:
            what = "the model" if name == self._base else "an adapter"
            raise BadRequestError(f"lora_name is {name!r}, as {what} here is called already", param="lora_name")
        try:
            check_place(path, None if trusted else self._folder)
        except CheckpointError as error:
            raise BadRequestError(f"lora_path is {error}", param="lora_path") from None

    async def _load(self, path: str) -> AdapterLoaded:
        try:
            result = await self._ask(LoadAdapterReq(path=path), AdapterLoaded)
        except BadRequestError as error:
            error.param = "lora_path"
            raise
        self._resident[result.adapter.digest] = result.adapter
        return result

    async def _load_again(self, ref: AdapterRef) -> None:
        if ref.digest in self._resident:
            return
        loaded = await self._load(ref.path)
        if loaded.adapter.digest != ref.digest:
            await self._drop_unnamed()
            raise BadRequestError(
                f"{ref.path} has changed since the adapter was loaded: unload it, and load it again", status=409
            )
        await self._make_room()

    async def _make_room(self) -> None:
        pinned = {one.ref.digest for one in self._named.values() if one.pinned}
        for digest in [*self._resident]:
            if len(self._resident) <= self._most:
                return
            if digest not in pinned and not self._users[digest] and digest != next(reversed(self._resident)):
                await self._drop(digest)

    async def _drop_unnamed(self) -> None:
        """Drop adapters that have no name and no request."""
        named = {one.ref.digest for one in self._named.values()}
        for digest in [*self._resident]:
            if digest not in named and not self._users[digest]:
                await self._drop(digest)

    async def _drop(self, digest: str) -> None:
        del self._resident[digest]
        await self._ask(UnloadAdapterReq(digest=digest), EngineState)
