"""What a chat template can do of what a request asks for, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve.frontend.chat_template import ChatTemplate
from vlmserve.frontend.parsers.reasoning import OPEN as THINK
from vlmserve.frontend.parsers.tool_use import ToolUse
from vlmserve_common.errors import BadRequestError

_SWITCH = "enable_thinking"
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptNotes:
    """What answers to a prompt are read with. thinking: it ends within the model's thoughts. warnings: what was not
    done as the request has it, a sentence each."""

    thinking: bool = False
    warnings: tuple[str, ...] = ()


NO_NOTES = PromptNotes()


def check_tool_use(template: ChatTemplate, use: ToolUse | None) -> tuple[str, ...]:
    """Warnings about tools that the template cannot show. Raises BadRequestError where one of them must be called."""
    if use is None or "tools" in template.variables:
        return ()
    why = "the model's chat template knows no tools"
    if use.required:
        raise BadRequestError(f"{why}, so a call cannot be required", param="tool_choice", code="invalid_value")
    return (f"tools has no effect: {why}",)


def template_kwargs(
    template: ChatTemplate, given: Mapping[str, Any], effort: str | None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Variables for the template, and warnings about those that it does not look at. given: the request's own. effort:
    its reasoning_effort."""
    warnings = [
        f"chat_template_kwargs.{name} has no effect: the model's chat template does not look at it"
        for name in given
        if name not in template.variables
    ]
    if effort is None or _SWITCH in given or _EFFORT in given:
        return given, tuple(warnings)
    if _EFFORT in template.variables:
        return {**given, _EFFORT: effort}, tuple(warnings)
    thinks = THINK in template.text
    if _SWITCH in template.variables:
        if effort not in ("none", "medium"):
            warnings.append(f"{_EFFORT} {effort!r} only turns thinking on: the model knows no degrees of it")
        return {**given, _SWITCH: effort != "none"}, tuple(warnings)
    if thinks or effort != "none":
        can = "always thinks" if thinks else "does not think"
        warnings.append(f"{_EFFORT} {effort!r} has no effect: by its chat template, the model {can}")
    return given, tuple(warnings)
