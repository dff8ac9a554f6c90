"""The checkpoint's chat template: messages to prompt text, in a sandbox.

Templates are Jinja as Hugging Face tokenizers define them (its `render_jinja_template`): blocks trimmed, `tojson` that
leaves non-ASCII text alone, `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlmserve.frontend.parsers.answer import OPEN as THINK
from vlmserve.frontend.parsers.calls import ToolUse
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.errors import BadRequestError, CheckpointError, first_line

Message = Mapping[str, Any]
_OURS = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A compiled template; safe to share between threads.

    source: Jinja text. tool_source: another template for requests with tools, as a few checkpoints have.
    special_tokens: what the template may know as bos_token, eos_token ... Raises CheckpointError for broken Jinja.

    text: both sources. variables: the names that the template reads; variables of other names have no effect.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is broken in line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens or {})
        self.text = source + (tool_source or "")
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(self.text)))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt's text. Raises BadRequestError when the template refuses the messages.

        continue_final_message: leave the last assistant message open, so that the answer goes on from its text.
        kwargs: variables of this template, e.g. enable_thinking.
        """
        kwargs = kwargs or {}
        taken = sorted(_OURS & kwargs.keys())
        if taken:
            raise BadRequestError(
                f"chat_template_kwargs may not set {taken[0]!r}, it has a field of its own",
                param="chat_template_kwargs",
            )
        if continue_final_message and add_generation_prompt:
            raise BadRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        template = self._tool_template if tools else self._template
        try:
            text = template.render(
                **self._special_tokens,
                **{k: v for k, v in kwargs.items() if k not in self._special_tokens},
                messages=[dict(m) for m in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template can fail in any way on messages it was not written for
            raise BadRequestError(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error
        return _cut_after(text, messages[-1]) if continue_final_message else text


class PairTemplate(ChatTemplate):
    """The template of a reranker. The last two of its messages are a query and a document, with roles of these names
    instead of the user's."""

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """See `ChatTemplate`. Raises BadRequestError for less than two messages, too."""
        if len(messages) < 2:
            raise BadRequestError("a reranker's prompt has two messages, the query and the document", param="messages")
        *before, query, document = messages
        return super().render([*before, {**query, "role": "query"}, {**document, "role": "document"}], **options)


def load_chat_template(
    folder: Path, given: str | None = None, *, kind: type[ChatTemplate] = ChatTemplate
) -> ChatTemplate:
    """Load the template of a checkpoint folder: chat_template.jinja, chat_template.json or tokenizer_config.json, in
    order. given: a file or a text of Jinja in its place. kind: of what is returned then.

    Raises CheckpointError if there is none or it is broken.
    """
    config = read_json(folder, "tokenizer_config.json", required=False)
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    if given is not None:
        return kind(given_source(given), special_tokens=tokens)
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens=tokens)
    found = read_json(folder, "chat_template.json", required=False).get("chat_template") or config.get("chat_template")
    if isinstance(found, str):
        return ChatTemplate(found, special_tokens=tokens)
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        if "default" in named:
            return ChatTemplate(named["default"], special_tokens=tokens, tool_source=named.get("tool_use"))
    raise CheckpointError(
        f"{folder} has no chat template: chat_template.jinja, chat_template.json or one in tokenizer_config.json"
    )


def given_source(given: str) -> str:
    """Return the Jinja of --chat-template: the setting itself, or a file's. Raises CheckpointError."""
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--chat-template is {given!r}, which cannot be read: {first_line(error)}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _cut_after(text: str, message: Message) -> str:
    """Cut a rendered prompt behind the text of its last message."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1].get("text") if content else None
    if message.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise BadRequestError(
            "continue_final_message needs a last message of the assistant with text to go on from",
            param="continue_final_message",
        )
    start = text.rfind(content.strip())
    if start < 0:
        raise BadRequestError(
            "the model's chat template changes the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return text[: start + len(content.strip())]


_MOST_VARIABLES = 256
_SWITCH = "enable_thinking"
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptNotes:
    """Facts about a prompt that its answers are read with. thinking: the prompt ends within the model's thoughts.
    warnings: a sentence for each field that had no effect."""

    thinking: bool = False
    warnings: tuple[str, ...] = ()


NO_NOTES = PromptNotes()


def check_tool_use(template: ChatTemplate, use: ToolUse | None) -> tuple[str, ...]:
    """Return warnings about tools that the template cannot show. Raises BadRequestError if a tool must be called."""
    if use is None or "tools" in template.variables:
        return ()
    why = "the model's chat template knows no tools"
    if use.required:
        raise BadRequestError(f"{why}, so a call cannot be required", param="tool_choice", code="invalid_value")
    return (f"tools has no effect: {why}",)


def template_kwargs(
    template: ChatTemplate, given: Mapping[str, Any], effort: str | None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return variables for the template, and warnings about those that it ignores. given: the request's own variables.
    effort: its reasoning_effort. Raises BadRequestError for too many variables."""
    if len(given) > _MOST_VARIABLES:
        what = f"chat_template_kwargs has {len(given)} variables; it must have at most {_MOST_VARIABLES}"
        raise BadRequestError(what, param="chat_template_kwargs", code="invalid_value")
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
