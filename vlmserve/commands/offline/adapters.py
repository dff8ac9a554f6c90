"""The LoRA adapters of an offline engine, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vlmserve.engine.adapters import EngineAdapters
from vlmserve.frontend.requests import GenerateReqInput
from vlmserve.ipc.control_messages import AdapterLoaded
from vlmserve_common.checkpoint.adapter_ref import check_place
from vlmserve_common.errors import BadRequestError, EngineError


class OfflineAdapters:
    """Adapters that requests may name. engine: None without --enable-lora. folder: where they must lie; None:
    anywhere."""

    def __init__(self, engine: EngineAdapters | None, folder: str | None = None) -> None:
        self._engine, self._folder = engine, folder
        self._named: dict[str, AdapterLoaded] = {}

    @property
    def loaded(self) -> Mapping[str, AdapterLoaded]:
        """Those that are there, by name."""
        return self._named

    def load(self, name: str, path: str, *, trusted: bool = False) -> None:
        """Load an adapter under a new name. Raises CheckpointError, or EngineError for a name that is taken. trusted:
        it may lie anywhere."""
        if self._engine is None:
            raise EngineError("this engine takes no LoRA adapters (setting --enable-lora)")
        if name in self._named:
            raise EngineError(f"there is an adapter {name!r} already")
        check_place(path, None if trusted else self._folder)
        self._named[name] = self._engine.load(path)

    def unload(self, name: str) -> None:
        """Forget an adapter. EngineError if there is none of this name."""
        if name not in self._named:
            raise EngineError(f"there is no adapter {name!r}")
        digest = self._named.pop(name).adapter.digest
        assert self._engine is not None
        if all(other.adapter.digest != digest for other in self._named.values()):
            self._engine.unload(digest)

    def adapted(self, request: GenerateReqInput, name: str | None) -> GenerateReqInput:
        """Return a request that an adapter answers; None: the model alone. Raises BadRequestError."""
        if name is None:
            return request
        if name not in self._named:
            known = ", ".join(self._named) or "none"
            raise BadRequestError(f"there is no adapter {name!r}; loaded are: {known}", param="lora", status=404)
        loaded = self._named[name]
        return replace(request, adapter=loaded.adapter, warnings=(*request.warnings, *loaded.warnings(name)))
