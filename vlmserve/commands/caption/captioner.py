"""Who answers: the engine in this process, or servers."""

from __future__ import annotations

from typing import Any, Protocol

from vlmserve.commands.batch.item import ChatRequest
from vlmserve_common.errors import VlmserveError


class CaptionStopped(VlmserveError):
    """Nobody can answer any more: the run ends, what is finished stays."""


class Captioner(Protocol):
    """model: the name that answers carry. identity: text that is another one where the same request may have another
    answer (weights, dtype; of a server, its model's name)."""

    model: str
    identity: str

    async def start(self) -> None:
        """Get ready; `model` and `identity` count from then on. Raises CaptionStopped."""
        ...

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """OpenAI's chat.completion object: choices with text and finish_reason, usage; `warnings` where there are any.

        BadRequestError and EngineError are about this request, CaptionStopped about all. Cancelled, it calls it off.
        """
        ...

    def notes(self) -> list[str]:
        """What the user should know at the end, a sentence each."""
        ...

    async def close(self) -> None:
        """Break off what is under way."""
        ...
