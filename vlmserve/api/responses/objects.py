"""The types of responses and of the events of their streams, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from vlmserve.api.answer_types import AnswerLogprob, Remarks
from vlmserve.api.openapi import Page
from vlmserve.api.responses.protocol import FunctionTool, TextConfig, ToolChoice
from vlmserve.frontend.request_stats import Timings

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


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The tokens of a response; timings come with return_usage_details."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    timings: NotRequired[Timings | None]


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
