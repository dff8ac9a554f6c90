"""Prompts: templates, filled in with a picture's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from processors.inputs import Modality
from vlmserve.commands.batch.item import ChatRequest, MediumItem
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

PROMPT_FILE = "prompt.txt"
_MOST_BYTES = 1 << 20
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedPrompt:
    """The rendered texts of one medium. prefix, suffix: stand around its captions."""

    prompt: str
    prefix: str
    suffix: str

    @property
    def texts(self) -> list[str]:
        """All three texts."""
        return [self.prompt, self.prefix, self.suffix]

    def whole(self, caption: str) -> str:
        """Return a caption between prefix and suffix."""
        return f"{self.prefix}{caption}{self.suffix}"


class Prompts:
    """Renders prompts. Thread-safe. prompt, prefix, suffix: Jinja2 templates. system: sent unchanged; None for none.

    An item's own prompt comes first, then prompt.txt in its folder (or the nearest one above it, up to the folder of
    the command line), then `prompt`. SettingsError for a template with a mistake.
    """

    def __init__(self, prompt: str, *, system: str | None = None, prefix: str = "", suffix: str = "") -> None:
        self._prompt = prompt
        self._prefix, self._suffix = prefix, suffix
        self._system = system
        self._nearest_prompt = lru_cache(maxsize=4096)(_nearest_prompt)
        for name, text in (("--prompt", prompt), ("--prefix", prefix), ("--suffix", suffix)):
            try:
                _template(text)
            except TemplateError as error:
                raise SettingsError(f"{name} {text!r} is no Jinja2 template: {error}") from None

    def ask(self, item: MediumItem) -> RenderedPrompt:
        """Render the texts of an item. Raises BadRequestError for a missing field, or a template with a mistake."""
        text = item.prompt if item.prompt is not None else self._of_folder(item)
        prompt, prefix, suffix = (_render(each, item.fields) for each in (text, self._prefix, self._suffix))
        if not prompt.strip():
            raise BadRequestError("the prompt is empty", code="invalid_prompt")
        return RenderedPrompt(prompt=prompt, prefix=prefix, suffix=suffix)

    def request(
        self, prompt: str, data: bytes, modality: Modality, *, knobs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ChatRequest:
        """Make the chat request about a medium. knobs: fields of its part. options: fields of the request."""
        content: Sequence[Mapping[str, Any]] = [
            {**knobs, "type": modality.value, modality.value: data},
            {"type": "text", "text": prompt},
        ]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return ChatRequest(messages=[*system, {"role": "user", "content": content}], options=options)

    def _of_folder(self, item: MediumItem) -> str:
        if item.path is None:
            return self._prompt
        found = self._nearest_prompt(item.path.parent, item.root or item.path.parent)
        return self._prompt if found is None else found


def _nearest_prompt(folder: Path, root: Path) -> str | None:
    """Return the text of prompt.txt in a folder, or the nearest one above it, up to `root`."""
    path = folder / PROMPT_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise BadRequestError(f"{path} has more than {_MOST_BYTES} bytes", code="invalid_prompt")
        return data.decode("utf-8-sig").strip()
    except FileNotFoundError:
        return _nearest_prompt(folder.parent, root) if folder != root and root in folder.parents else None
    except OSError as error:
        raise BadRequestError(f"cannot read {path}: {error.strerror}", code="invalid_prompt") from None
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{path} is not UTF-8: {error.reason}", code="invalid_prompt") from None


@lru_cache(maxsize=256)
def _template(text: str) -> Template:
    return _ENVIRONMENT.from_string(text)


def _render(text: str, fields: Mapping[str, Any]) -> str:
    try:
        return _template(text).render(fields)
    except Exception as error:  # a template may do anything
        told = f"cannot be filled in: {type(error).__name__}: {error}"
        if isinstance(error, UndefinedError):
            told = f"needs what is not there: {error.message}; its fields: {', '.join(sorted(fields)) or 'none'}"
        raise BadRequestError(f"the template {_shown(text)} {told}", code="invalid_prompt") from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}...")
