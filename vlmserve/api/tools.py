"""The fields of a chat completion request about tools."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.api.errors import invalid_value
from vlmserve.api.protocol import ChatCompletionRequest, NamedToolChoice
from vlmserve.frontend.parsers.answer import AnswerFormats
from vlmserve.frontend.parsers.calls import Tool
from vlmserve.frontend.parsers.tool_use import ToolUse


def tool_use(request: ChatCompletionRequest, formats: AnswerFormats) -> ToolUse | None:
    """Return how a request's answers may use tools; None if they may not."""
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return None
    return ToolUse(
        tools=request.tools,  # type: ignore[arg-type]  # kept as the client wrote them
        call_format=formats.calls,
        choice="required" if choice == "required" else "auto",
        name=choice.function.name if isinstance(choice, NamedToolChoice) else None,
        parallel=request.parallel_tool_calls is not False,
    )


def check_tools(request: ChatCompletionRequest) -> None:
    """Raise BadRequestError for two tools of one name, and for a tool_choice without such a tool."""
    tools: Sequence[Tool] = request.tools or ()  # type: ignore[assignment]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            place = f"tools[{index}].function.name"
            raise invalid_value(place, f"{place} is {name!r}, as another tool is called: each needs a name of its own")
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        what = f"tool_choice names the function {choice.function.name!r}, which is not among the tools {names}"
        raise invalid_value("tool_choice", what)
    if choice == "required" and not names:
        raise invalid_value("tool_choice", "tool_choice required needs tools")
