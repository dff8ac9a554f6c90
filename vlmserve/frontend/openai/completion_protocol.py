"""The shape of OpenAI's (legacy) completion requests, as strict as the shape of chats."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from vlmserve.frontend.openai.protocol import SampledRequest, TokenIds


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return "ids" if isinstance(first, int) else "id_lists" if isinstance(first, list) else "texts"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(min_length=1), Tag("id_lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be text, a list of texts, token ids or a list of such lists",
    ),
]


class CompletionRequest(SampledRequest):
    """POST /v1/completions: the fields of chats, where they make sense, and OpenAI's own."""

    model: str
    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
