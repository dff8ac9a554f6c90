"""Prompts, tasks and results: an item on its way through a run, to the output and the journal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from jinja2 import StrictUndefined, Template, TemplateError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from processors.inputs import Modality
from vlmserve.commands.batch.item import ChatRequest, Failed, Item, MediumItem, RequestItem
from vlmserve.commands.batch.progress import RunTally, phrases
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

PROMPT_FILE = "prompt.txt"
_MOST_PROMPT_BYTES = 1 << 20
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


_MOST_BYTES = 200  # of a name; a suffix follows, and file systems take 255
_NO_NAME = re.compile(r"[\x00-\x1f\\:*?\"<>|\ud800-\udc7f\udd00-\udfff]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionTask:
    """An item to caption. asked: the rendered prompt; None for a chat request, which has its own.

    key: digest of the item and its prompt, without its content. target: the caption's own file, if it has one.
    """

    item: Item
    key: bytes
    asked: RenderedPrompt | None = None
    target: str | None = None

    def failed(self, message: str, code: str | None) -> Failed:
        """Return the failure of this task."""
        return Failed(id=self.item.id, key=self.key, message=message, code=code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Captioned:
    """A finished item. fingerprint: digest of content and prompt. record: see `make_record`.

    data, modality: the medium, if there is one. usage: tokens of the answer; None if it is another item's answer.
    """

    task: CaptionTask
    fingerprint: bytes
    record: Mapping[str, Any]
    data: bytes | None = None
    modality: Modality | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    """A finished item whose file has a new date but the same content. trouble: why its caption cannot be restored."""

    task: CaptionTask
    trouble: str | None


Result: TypeAlias = Captioned | Failed | Touched


@dataclass(kw_only=True)
class CaptionTally(RunTally):
    """The counts of a caption run, in items unless named otherwise.

    reused: items that got the caption of an equal item. failed_before: items that failed in an earlier run, and were
    not tried again. repeated: items named twice. prompt_tokens, completion_tokens: of answers. cached_tokens: prompt
    tokens found in the prefix cache.
    """

    reused: int = 0
    failed_before: int = 0
    repeated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    unit: ClassVar[str] = "tokens"

    @property
    def hits(self) -> int:
        return self.reused

    @property
    def work(self) -> int:
        return self.completion_tokens

    @property
    def passed(self) -> int:
        return super().passed + self.failed_before + self.repeated

    @property
    def worked_on(self) -> int:
        return super().worked_on + self.reused

    def add(self, results: Iterable[Captioned]) -> None:
        """Count results that are on disk."""
        for result in results:
            if result.usage is None:
                self.reused += 1
                continue
            self.done += 1
            self.prompt_tokens += result.usage.get("prompt_tokens") or 0
            self.completion_tokens += result.usage.get("completion_tokens") or 0
            details = result.usage.get("prompt_tokens_details") or {}
            self.cached_tokens += details.get("cached_tokens") or 0

    def summary(self, seconds: float, notes: Sequence[str], *, ended: str) -> dict[str, Any]:
        """Return the summary for JSON. ended: "finished", "interrupted" or "stopped"."""
        return {**asdict(self), "seconds": round(seconds, 3), "ended": ended, "notes": list(notes)}

    def describe(self, seconds: float, *, ended: str) -> str:
        """Return the summary as a line for people."""
        made = self.done + self.reused
        rate = made / seconds if seconds > 0 else 0.0
        parts = [f"{ended}: {made} captioned in {seconds:.1f} s ({rate:.1f} items/s, {self.completion_tokens} tokens)"]
        parts += phrases(
            (self.reused, "of them the same as others"),
            (self.skipped, "finished before"),
            (self.failed, "failed"),
            (self.failed_before, "failed before (--retry-failed tries them again)"),
            (self.repeated, "named twice"),
        )
        return ", ".join(parts)


def make_record(
    item: Item, answer: Mapping[str, Any], captions: Sequence[str], *, digest: str | None, prompt: str | None
) -> dict[str, Any]:
    """Make the record of an item for outputs, in JSON's types.

    answer: the chat.completion. captions: its texts, with prefix and suffix. digest: of the medium, in hex.
    """
    finishes = [choice.get("finish_reason") for choice in answer["choices"]]
    usage = answer.get("usage") or {}
    record: dict[str, Any] = {
        "id": item.id,
        "caption": captions[0],
        **({"captions": list(captions)} if len(captions) > 1 else {}),
        "model": answer.get("model"),
        "finish_reason": finishes[0] if len(set(finishes)) == 1 else finishes,
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        **({"warnings": answer["warnings"]} if answer.get("warnings") else {}),
        **({"prompt": prompt} if prompt is not None else {}),
        **({"blake3": digest} if digest is not None else {}),
    }
    if isinstance(item, RequestItem):
        record["response"] = answer
    return _writable({**record, **_named_by(item)})


def like_another(record: Mapping[str, Any], item: Item) -> dict[str, Any]:
    """Return the record of an item that is equal to one with this record, except for its name and fields."""
    taken = {name: value for name, value in record.items() if name not in ("custom_id", "fields")}
    return _writable({**taken, "id": item.id, **_named_by(item)})


def _named_by(item: Item) -> dict[str, Any]:
    if isinstance(item, MediumItem):
        return {"fields": dict(item.fields)} if item.fields else {}
    return {"custom_id": item.id} if item.is_batch else {}


def _writable(record: dict[str, Any]) -> dict[str, Any]:
    """Replace halves of surrogate pairs, which scraped texts have and UTF-8 does not allow."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return dict(json.loads(text.encode("utf-8", "replace")))
    return record


def output_line(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of JSON for a record. Requests in OpenAI's batch form are answered in it."""
    if "custom_id" in record:
        answer = record["response"]
        return {
            "id": f"batch_req_{record['custom_id']}",
            "custom_id": record["custom_id"],
            "response": {"status_code": 200, "request_id": answer.get("id"), "body": answer},
            "error": None,
        }
    return {name: value for name, value in record.items() if name != "response"}


def texts(record: Mapping[str, Any]) -> list[str]:
    """Return a record's captions, at least one."""
    return list(record.get("captions") or [record["caption"]])


def as_text(record: Mapping[str, Any]) -> str:
    """Return the captions for a text file. Several stand on one line each, with blanks for their line breaks."""
    found = texts(record)
    return (found[0] if len(found) == 1 else "\n".join(" ".join(text.split()) for text in found)) + "\n"


def file_name(item: Item) -> str:
    """Return the path of an item below an output folder, without a suffix. It never leads outside."""
    inside: str | Path = item.id.split("://", 1)[-1]
    if isinstance(item, MediumItem) and item.path is not None:
        inside = item.path.relative_to(item.root) if item.root is not None else item.path.name
    *folders, name = str(inside).split("/")
    if not isinstance(item, RequestItem):
        name = name.rpartition(".")[0] or name
    parts = [*folders, name]
    safe = [os.fsdecode(os.fsencode(_NO_NAME.sub("_", part))[:_MOST_BYTES]) for part in parts]
    return "/".join(part for part in safe if part not in ("", ".", "..")) or "caption"
