"""The chat completion request that answers a Responses request."""

from __future__ import annotations

from typing import Any

from vlmserve.api.responses.items import Conversation
from vlmserve.api.responses.protocol import AllowedTools, NamedFunction, ResponsesRequest, TextFormat
from vlmserve.frontend.openai.json_bodies import checked
from vlmserve.frontend.openai.protocol import ChatCompletionRequest
from vlmserve_common.errors import BadRequestError

_LOGPROBS = "message.output_text.logprobs"
# fields that mean the same in both: those of one name, except these
_OTHER = {"metadata", "store", "stream", "stream_options", "tool_choice", "tools"}
_SAME = (ResponsesRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()) - _OTHER


def to_chat_request(request: ResponsesRequest, conversation: Conversation) -> ChatCompletionRequest:
    """Convert a Responses request. Raises BadRequestError for fields that are not supported, or make no chat."""
    _refuse_unsupported(request)
    raw: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    raw["messages"] = conversation.messages
    raw["stream"], raw["stream_options"] = True, {"include_usage": True}
    if request.max_output_tokens is not None:
        raw["max_completion_tokens"] = request.max_output_tokens
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        raw["logprobs"] = True
    if request.text is not None and request.text.verbosity is not None:
        raw["verbosity"] = request.text.verbosity
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        raw["response_format"] = _response_format(request.text.format)
    if request.reasoning is not None and request.reasoning.effort is not None:
        raw["reasoning_effort"] = request.reasoning.effort
    raw |= _tools(request)
    try:
        return checked(raw, ChatCompletionRequest)
    except BadRequestError as error:
        raise conversation.named(error) from None


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    tools = request.tools or []
    choice = request.tool_choice
    fields: dict[str, Any] = {}
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        unknown = sorted(allowed - {tool.name for tool in tools})
        if unknown:
            what = f"tool_choice allows the function {unknown[0]!r}, which is not among the tools"
            raise BadRequestError(what, param="tool_choice", code="invalid_value")
        tools = [tool for tool in tools if tool.name in allowed]
        fields["tool_choice"] = choice.mode
    elif isinstance(choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = choice
    if tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in tools
        ]
    return fields


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    for name, value in (("name", given.name), ("schema", given.schema_)):
        if value is None:
            param = f"text.format.{name}"
            raise BadRequestError(f"{param} is missing; a json_schema needs it", param=param, code="invalid_value")
    schema = given.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


def _refuse_unsupported(request: ResponsesRequest) -> None:
    if request.background:
        raise _unsupported("background", "background: true")
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise _unsupported(name, name)


def _unsupported(param: str, what: str) -> BadRequestError:
    return BadRequestError(f"{what} is not supported", param=param, code="unsupported_parameter")
