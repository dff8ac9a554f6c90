"""The shapes of OpenAI's Responses requests and answers. Items of the input are kept as the client wrote them; `items`
checks their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from vlmserve.api.answer_types import AnswerLogprob, GuessedTokens, MoreUsage, Remarks
from vlmserve.api.pages import Page
from vlmserve.frontend.openai.protocol import Metadata, NamedRequest, Stop, StrictModel


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

    model: str | None = None
    input: Input

    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Metadata | None = None
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
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_mm_report: bool | None = None
    return_usage_details: bool | None = None
    return_spec_tokens_details: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    session_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[AnswerLogprob]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(TypedDict):
    """A call of a function. arguments: JSON, as the model wrote it."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | ReasoningItem | FunctionCallItem, Field(discriminator="type")]
OutputPart = Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class InputTokensDetails(TypedDict):
    """The kinds of the input's tokens; the last three come with return_usage_details."""

    cached_tokens: int
    cache_write_tokens: int
    text_tokens: NotRequired[int]
    image_tokens: NotRequired[int]
    video_tokens: NotRequired[int]


class OutputTokensDetails(GuessedTokens):
    reasoning_tokens: int


class ResponseUsage(MoreUsage):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ReasoningOptions(TypedDict):
    effort: str | None
    summary: str | None


class ResponseObject(Remarks):
    """A response, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: TextConfig
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    user: str | None


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Page):
    """A page of the items of a request. data: the items as the client wrote them, each with an id and a type."""

    data: list[dict[str, Any]]


# ---- events


class _Event(TypedDict):
    sequence_number: int


class ResponseStateEvent(_Event):
    """An event with the whole response: the first two and the last one of a stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class OutputItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(_Event):
    item_id: str
    output_index: int


class ContentPartEvent(_OfItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputPart


class TextDeltaEvent(_OfItem):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[AnswerLogprob]


class TextDoneEvent(_OfItem):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[AnswerLogprob]


class ReasoningDeltaEvent(_OfItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDoneEvent(_OfItem):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDeltaEvent(_OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_OfItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str
    name: str


ResponseEvent = Annotated[
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent,
    Field(discriminator="type"),
]
