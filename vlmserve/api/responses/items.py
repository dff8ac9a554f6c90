"""Requests in the form of Responses, and the items of their conversations, become chat requests."""

from __future__ import annotations

import base64
import binascii
import mimetypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from processors.formats import HEAD_BYTES, modality_of
from vlmserve.api.request_id import new_id
from vlmserve.api.responses.protocol import AllowedTools, NamedFunction, ResponsesRequest, TextFormat
from vlmserve.frontend.chat_messages import Message
from vlmserve.frontend.openai.json_bodies import checked
from vlmserve.frontend.openai.protocol import ChatCompletionRequest
from vlmserve_common.errors import BadRequestError

_PLACE = re.compile(r"messages\[(\d+)\]")
_FORM = re.compile(r"response_format(\.json_schema)?")
_ID_KINDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The messages of a chat. places: the place of each message in the request, such as "input[2]". shown: the messages
    with processed media, once these are loaded."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    shown: list[Message] | None = None

    def named(self, error: BadRequestError) -> BadRequestError:
        """Return an error about a chat with the places and field names of this API."""

        def place(match: re.Match[str]) -> str:
            number = int(match[1])
            return self.places[number] if number < len(self.places) else "input"

        def renamed(text: str) -> str:
            return _FORM.sub("text.format", _PLACE.sub(place, text))

        param = error.param and renamed(error.param)
        message = renamed(error.message)
        param = "input" if param == "messages" else param
        return BadRequestError(message, param=param, code=error.code, status=error.status)

    def without_turns(self, count: int) -> Conversation | None:
        """Return the conversation without its first `count` turns, or None if no turn would be left. System messages
        stay.

        A turn goes from a message of the user to the next.
        """
        starts = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        if count >= len(starts):
            return None
        keep = [
            at
            for at, message in enumerate(self.messages)
            if at >= starts[count] or message["role"] in ("system", "developer")
        ]
        shown = None if self.shown is None else [self.shown[at] for at in keep]
        return Conversation(
            messages=[self.messages[at] for at in keep], places=[self.places[at] for at in keep], shown=shown
        )


def with_ids(given: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an input as it is stored: items in their long form, each with an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    found = []
    for item in given:
        kind = item.get("type", "message")
        full = {"id": new_id(_ID_KINDS.get(kind, "item")).replace("-", "_"), "type": kind, **item}
        if kind == "message" and isinstance(full.get("content"), str):
            text = "output_text" if full.get("role") == "assistant" else "input_text"
            full["content"] = [{"type": text, "text": full["content"]}]
        found.append(full)
    return found


def to_conversation(
    before: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]], instructions: str | None
) -> Conversation:
    """Return the messages of earlier and new items. before: the items of earlier responses. Raises BadRequestError
    naming the item and part."""
    found = Conversation()
    if instructions is not None:
        _add(found, {"role": "system", "content": instructions}, "instructions")
    reasoning = ""
    for index, item in enumerate([*before, *given]):
        at = index - len(before)
        place = f"input[{at}]" if at >= 0 else "previous_response_id"
        if not isinstance(item, Mapping):
            raise _invalid(place, f"is of type {type(item).__name__}; it must be an object")
        kind = item.get("type", "message")
        match kind:
            case "message":
                _add(found, _message(item, place), place)
            case "function_call":
                _call(found, item, place)
            case "function_call_output":
                _add(found, _output(item, place), place)
            case "reasoning":
                reasoning = _reasoning(item)
                continue
            case _:
                allowed = "message, function_call, function_call_output or reasoning"
                raise _invalid(f"{place}.type", f"is {kind!r}; it must be {allowed}")
        if reasoning and found.messages[-1]["role"] == "assistant":
            found.messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return found


def _add(found: Conversation, message: dict[str, Any], place: str) -> None:
    found.messages.append(message)
    found.places.append(place)


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise _invalid(f"{place}.role", f"is {role!r}; it must be user, assistant, system or developer")
    if isinstance(content, list):
        content = [_part(part, f"{place}.content[{at}]") for at, part in enumerate(content)]
        if role == "assistant" and all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise _invalid(f"{place}.content", "must be text or a list of parts")
    return {"role": role, "content": content}


def _part(part: Any, place: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    match kind:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": _text(part, "text", place)}
        case "refusal":
            return {"type": "refusal", "refusal": _text(part, "refusal", place)}
        case "input_image":
            source = _one_of(part, ("image_url", "file_id"), place)
            name, value = source
            if not isinstance(value, str):
                raise _invalid(f"{place}.{name}", f"is of type {type(value).__name__}; it must be text")
            detail = part.get("detail")
            image = {"url" if name == "image_url" else name: value}
            # "original" is what pictures are taken at unless a limit says otherwise
            return {
                "type": "image_url",
                "image_url": image | ({} if detail in (None, "original") else {"detail": detail}),
            }
        case "input_file":
            return _file(part, place)
        case "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio")}
    allowed = "input_text, input_image, input_audio, input_file, output_text or refusal"
    raise _invalid(f"{place}.type", f"is {kind!r}; it must be {allowed}")


def _file(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a picture, a video or a sound. The client's name for the file decides if its bytes are not there yet."""
    name, value = _one_of(part, ("file_id", "file_data", "file_url"), place)
    if not isinstance(value, str):
        raise _invalid(f"{place}.{name}", f"is of type {type(value).__name__}; it must be text")
    if name == "file_id":
        return {"type": "file", "file": {"file_id": value}}
    filename = part.get("filename") if isinstance(part.get("filename"), str) else None
    if name == "file_url":
        kind = (mimetypes.guess_type(filename or urlsplit(value).path)[0] or "").partition("/")[0]
    else:
        data = value.partition(",")[2] if value.startswith("data:") else value
        kind = _kind_of(data) or ""
        value = value if value.startswith("data:") else f"data:application/octet-stream;base64,{data}"
    if kind not in ("image", "video", "audio"):
        raise BadRequestError(
            f"{place}.{name} is neither a picture nor a video of a supported format",
            param=f"{place}.{name}",
            code="unsupported_content",
        )
    return {"type": f"{kind}_url", f"{kind}_url": {"url": value}}


def _kind_of(data: str) -> str | None:
    try:
        modality = modality_of(base64.b64decode(data[: HEAD_BYTES // 3 * 4]))
    except (binascii.Error, ValueError):
        return None
    return None if modality is None else modality.value


def _call(found: Conversation, item: Mapping[str, Any], place: str) -> None:
    """Add a call to the answer's message before it, or to a message of calls only."""
    function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
    call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
    if found.messages and found.messages[-1]["role"] == "assistant":
        found.messages[-1].setdefault("tool_calls", []).append(call)
    else:
        _add(found, {"role": "assistant", "content": None, "tool_calls": [call]}, place)


def _output(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    output = item.get("output")
    if isinstance(output, list):
        parts = [_part(part, f"{place}.output[{at}]") for at, part in enumerate(output)]
        other = next((at for at, part in enumerate(parts) if part["type"] != "text"), None)
        if other is not None:
            raise _invalid(f"{place}.output[{other}].type", "must be input_text: pictures belong into user messages")
        output = "".join(part["text"] for part in parts)
    elif not isinstance(output, str):
        raise _invalid(f"{place}.output", "must be text or a list of parts")
    return {"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": output}


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part.get("text", "") for part in parts if isinstance(part, Mapping))


def _one_of(part: Mapping[str, Any], names: Sequence[str], place: str) -> tuple[str, Any]:
    given = [(name, part[name]) for name in names if part.get(name) is not None]
    if len(given) != 1:
        raise _invalid(place, f"needs one of {', '.join(names)}")
    return given[0]


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{place}.{name}", "is missing or not text")
    return value


def _invalid(param: str, what: str) -> BadRequestError:
    return BadRequestError(f"{param} {what}", param=param, code="invalid_value")


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
