"""Tasks and results: an item on its way through a run, to the output and the journal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from processors.inputs import Modality
from vlmserve.commands.batch.item import Failed, Item, MediumItem, RequestItem
from vlmserve.commands.batch.progress import RunTally, phrases
from vlmserve.commands.caption.prompts import RenderedPrompt

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
    verb: ClassVar[str] = "captioned"

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
        parts = [f"{ended}: {made} {self.verb} in {seconds:.1f} s ({rate:.1f} items/s, {self.work} {self.unit})"]
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


def make_vector_record(item: Item, answer: Mapping[str, Any], *, digest: str | None) -> dict[str, Any]:
    """Make the record of an item's vector. answer: its `embedding`, base64 of float16, with `model` and `usage`."""
    record = {
        "id": item.id,
        "embedding": answer["embedding"],
        "model": answer["model"],
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        **({"blake3": digest} if digest is not None else {}),
    }
    return _writable(
        {**record, **({"fields": dict(item.fields)} if isinstance(item, MediumItem) and item.fields else {})}
    )


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
