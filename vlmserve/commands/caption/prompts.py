"""Prompts: what each item is asked, and the chat request that asks it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from processors.inputs import Modality
from vlmserve.commands.batch.item import ChatRequest, MediumItem
from vlmserve.commands.caption.templates import TemplateProcess
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

DEFAULT_PROMPT = "Describe the picture."
PROMPT_FILE = "prompt.txt"
_MOST_PROMPT_BYTES = 1 << 20


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
    """Renders prompts. prompt, prefix, suffix: the user's Jinja2 templates. system: sent unchanged; None for none.

    An item's own prompt comes first, then prompt.txt in its folder (or the nearest one above it, up to the folder of
    the command line), then `prompt`. needed: media go with a prompt; otherwise an empty one means the medium alone,
    and there is no prompt.txt. Close it after use.
    """

    def __init__(
        self, prompt: str, *, system: str | None = None, prefix: str = "", suffix: str = "", needed: bool = True
    ) -> None:
        self.needed = needed
        self._prompt = prompt
        self._prefix, self._suffix = prefix, suffix
        self._system = system
        self._templates = TemplateProcess()
        self._nearest_prompt = lru_cache(maxsize=4096)(_nearest_prompt)

    def check(self, fields: Callable[[], Collection[str] | None] = lambda: None) -> None:
        """Raise SettingsError for a template of the user with a mistake, or with a field that no item has.

        fields: returns the names that items can have; None if only reading them tells. Call this in the main thread.
        """
        for name, text in (("--prompt", self._prompt), ("--prefix", self._prefix), ("--suffix", self._suffix)):
            try:
                self._templates.check(text, fields() if "{" in text else None)
            except BadRequestError as error:
                raise SettingsError(f"{name}: {error.message}") from None

    def ask(self, item: MediumItem) -> RenderedPrompt:
        """Render the texts of an item, in one thread. Raises BadRequestError for a template that cannot be rendered."""
        own = item.prompt if item.prompt is not None else self._of_folder(item)
        texts = (self._prompt if own is None else own, self._prefix, self._suffix)
        prompt, prefix, suffix = (self._templates.render(text, item.fields) for text in texts)
        if self.needed and not prompt.strip():
            raise BadRequestError("the prompt is empty", code="invalid_prompt")
        return RenderedPrompt(prompt=prompt, prefix=prefix, suffix=suffix)

    def request(
        self, prompt: str, data: bytes, modality: Modality, *, knobs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ChatRequest:
        """Make the chat request about a medium. knobs: fields of its part. options: fields of the request."""
        content: Sequence[Mapping[str, Any]] = [
            {**knobs, "type": modality.value, modality.value: data},
            *([{"type": "text", "text": prompt}] if prompt else []),
        ]
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return ChatRequest(messages=[*system, {"role": "user", "content": content}], options=options)

    def close(self) -> None:
        """End the process for templates, from any thread."""
        self._templates.close()

    def _of_folder(self, item: MediumItem) -> str | None:
        if item.path is None or not self.needed:
            return None
        return self._nearest_prompt(item.path.parent, item.root or item.path.parent)


def _nearest_prompt(folder: Path, root: Path) -> str | None:
    """Return the text of prompt.txt in a folder, or the nearest one above it, up to `root`."""
    path = folder / PROMPT_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_PROMPT_BYTES + 1)
        if len(data) > _MOST_PROMPT_BYTES:
            raise BadRequestError(f"{path} has more than {_MOST_PROMPT_BYTES} bytes", code="invalid_prompt")
        return data.decode("utf-8-sig").strip()
    except FileNotFoundError:
        return _nearest_prompt(folder.parent, root) if folder != root and root in folder.parents else None
    except OSError as error:
        raise BadRequestError(f"cannot read {path}: {error.strerror}", code="invalid_prompt") from None
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{path} is not UTF-8: {error.reason}", code="invalid_prompt") from None
