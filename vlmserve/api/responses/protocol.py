"""The shape of OpenAI's Responses requests. Items of the input are kept as the client wrote them; `to_chat` checks
their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from vlmserve.frontend.openai.protocol import NamedRequest, Stop, StrictModel


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(StrictModel):
    type: Literal["function"]
    name: str


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)]


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunction, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="must be none, auto, required, a function or allowed_tools",
    ),
]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None


def _input_kind(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "items" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[dict[str, Any]], Field(min_length=1), Tag("items")],
    Discriminator(_input_kind, custom_error_type="input_type", custom_error_message="must be text or a list of items"),
]


class ResponsesRequest(NamedRequest):
    """POST /v1/responses: OpenAI's fields, then the extensions that chats have, too."""

    model: str
    input: Input

    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: list[FunctionTool] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None

    # accepted, without an effect on the answer
    max_tool_calls: int | None = None  # of tools that a server calls
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    user: str | None = None

    # official, not supported (see items.py)
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    # extensions
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Stop = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_mm_report: bool | None = None
    return_usage_details: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    session_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
