"""Endpoints that load and unload LoRA adapters while the server runs, under vLLM's and SGLang's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.openapi import BODY_ERRORS, ENGINE_ERRORS, ID_ERRORS, operation
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.adapters import AdapterRegistry, NamedAdapter
from vlmserve.frontend.openai.protocol import StrictModel

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterBody(StrictModel):
    """The body of POST /v1/load_lora_adapter. pinned: it stays in memory. load_inplace: no other value is taken."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1)]
    pinned: bool | None = None
    load_inplace: Literal[False] | None = None


class UnloadAdapterBody(StrictModel):
    """The body of POST /v1/unload_lora_adapter. lora_int_id is ignored."""

    lora_name: _Name
    lora_int_id: int | None = None


class AdapterChange(TypedDict):
    """What came of it. loaded_adapters: the folders of all adapters by name."""

    success: bool
    message: str
    loaded_adapters: dict[str, str]
    warnings: list[str]


def _load_at(path: str, id: str) -> Any:
    @operation(
        *("POST", path, id, "Operators"),
        request=LoadAdapterBody,
        example={"lora_name": "captions", "lora_path": "/adapters/captions"},
        answer=AdapterChange,
        errors=(*BODY_ERRORS, 409, *ENGINE_ERRORS),
    )
    async def load(self: AdapterApi, request: Request) -> Response:
        """Load a LoRA adapter from a folder of PEFT under a new name, by which requests choose it as their model."""
        body = await read_body(request, LoadAdapterBody, self.settings)
        adapter = await self.adapters.load(body.lora_name, body.lora_path, pinned=bool(body.pinned))
        return self.answer(f"{adapter.name!r} is loaded", adapter)

    return load


def _unload_at(path: str, id: str) -> Any:
    @operation(
        *("POST", path, id, "Operators"),
        request=UnloadAdapterBody,
        example={"lora_name": "captions"},
        answer=AdapterChange,
        errors=(*BODY_ERRORS, *ID_ERRORS, *ENGINE_ERRORS),
    )
    async def unload(self: AdapterApi, request: Request) -> Response:
        """Forget the name of a LoRA adapter. Requests that run end with it, and then it leaves memory."""
        body = await read_body(request, UnloadAdapterBody, self.settings)
        adapter = await self.adapters.unload(body.lora_name)
        return self.answer(f"{adapter.name!r} is unloaded", adapter)

    return unload


class AdapterApi:
    """The endpoints of operators for LoRA adapters, each at vLLM's path and at SGLang's."""

    load = _load_at("/v1/load_lora_adapter", "loadLoraAdapter")
    unload = _unload_at("/v1/unload_lora_adapter", "unloadLoraAdapter")
    load_too = _load_at("/load_lora_adapter", "loadLoraAdapterToo")
    unload_too = _unload_at("/unload_lora_adapter", "unloadLoraAdapterToo")

    def __init__(self, adapters: AdapterRegistry, settings: ServerSettings) -> None:
        self.adapters, self.settings = adapters, settings

    def answer(self, message: str, adapter: NamedAdapter) -> Response:
        """Return what came of a change."""
        paths = {one.name: one.ref.path for one in self.adapters.all()}
        change = AdapterChange(success=True, message=message, loaded_adapters=paths, warnings=list(adapter.warnings))
        return JSONResponse(change)
