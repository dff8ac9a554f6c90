"""What became of an item, on its way to the output and the journal."""

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
from vlmserve.commands.caption.prompts import Asked

_MOST_BYTES = 200  # of a name; a suffix follows, and file systems take 255
_NO_NAME = re.compile(r"[\x00-\x1f\\:*?\"<>|\ud800-\udc7f\udd00-\udfff]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """An item to be captioned. asked: None for a request, which asks by itself. target: the file that its caption goes
    to, where each has one. key: of the item and how it is asked, from what is known without reading it."""

    item: Item
    key: bytes
    asked: Asked | None = None
    target: str | None = None

    def failed(self, message: str, code: str | None) -> Failed:
        """What to tell when it is."""
        return Failed(id=self.item.id, key=self.key, message=message, code=code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Captioned:
    """A finished item. fingerprint: as `Work.key`, but of the content, too. record: see `make_record`. data, modality:
    of the medium, where there is one. usage: tokens that the answer took; None: it is another's."""

    work: Work
    fingerprint: bytes
    record: Mapping[str, Any]
    data: bytes | None = None
    modality: Modality | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    """A finished item whose file looks different, but is the same. trouble: its caption could not be put back."""

    work: Work
    trouble: str | None


Result: TypeAlias = Captioned | Failed | Touched


@dataclass
class Tally:
    """Of items. total: how many there are, as far as they have been counted; counted: whether that is all of them.

    done: captioned by the model. reused: the same as another item, whose caption they got. skipped: finished by a run
    before. failed: in this run. failed_before: in one before, and not tried again. repeated: named twice.
    prompt_tokens, completion_tokens: of answers. cached_tokens: of prompts, found in the prefix cache.
    """

    total: int = 0
    counted: bool = False
    done: int = 0
    reused: int = 0
    skipped: int = 0
    failed: int = 0
    failed_before: int = 0
    repeated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    unit: ClassVar[str] = "tokens"

    @property
    def hits(self) -> int:
        """Captions that are another item's."""
        return self.reused

    @property
    def work(self) -> int:
        """Tokens that were made."""
        return self.completion_tokens

    @property
    def passed(self) -> int:
        """Items that need no more attention."""
        return self.done + self.reused + self.skipped + self.failed + self.failed_before + self.repeated

    @property
    def worked_on(self) -> int:
        """Items that this run has finished, for better or worse."""
        return self.done + self.reused + self.failed

    def add(self, results: Iterable[Captioned]) -> None:
        """These are finished, and on disk."""
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
        """Return everything about a run, for JSON. ended: "finished", "interrupted" or "stopped"."""
        return {**asdict(self), "seconds": round(seconds, 3), "ended": ended, "notes": list(notes)}

    def describe(self, seconds: float, *, ended: str) -> str:
        """Return the summary as a line for people."""
        made = self.done + self.reused
        rate = made / seconds if seconds > 0 else 0.0
        parts = [f"{ended}: {made} captioned in {seconds:.1f} s ({rate:.1f} items/s, {self.completion_tokens} tokens)"]
        told = (
            (self.reused, "of them the same as others"),
            (self.skipped, "finished before"),
            (self.failed, "failed"),
            (self.failed_before, "failed before (--retry-failed tries them again)"),
            (self.repeated, "named twice"),
        )
        return ", ".join([*parts, *(f"{count} {what}" for count, what in told if count)])


def make_record(
    item: Item, answer: Mapping[str, Any], captions: Sequence[str], *, digest: str | None, prompt: str | None
) -> dict[str, Any]:
    """What outputs say of an item, in JSON's types.

    answer: the chat.completion. captions: its texts, as they are to be written. digest: of the medium, in hex.
    prompt: what was asked.
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
    """The record of an item that is the same, but for its name and fields, as one with this record."""
    taken = {name: value for name, value in record.items() if name not in ("custom_id", "fields")}
    return _writable({**taken, "id": item.id, **_named_by(item)})


def _named_by(item: Item) -> dict[str, Any]:
    if isinstance(item, MediumItem):
        return {"fields": dict(item.fields)} if item.fields else {}
    return {"custom_id": item.id} if item.is_batch else {}


def _writable(record: dict[str, Any]) -> dict[str, Any]:
    """Without halves of characters, which scraped texts have and UTF-8 cannot."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return dict(json.loads(text.encode("utf-8", "replace")))
    return record


def output_line(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a line of JSON has it: what came in OpenAI's batch form goes out in it."""
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
    """A record's captions, one at least."""
    return list(record.get("captions") or [record["caption"]])


def as_text(record: Mapping[str, Any]) -> str:
    """The captions as a text file has them: several on a line each, their own line breaks made blanks."""
    found = texts(record)
    return (found[0] if len(found) == 1 else "\n".join(" ".join(text.split()) for text in found)) + "\n"


def file_name(item: Item) -> str:
    """Where an item belongs in a folder, without a suffix: parts with "/" between them, none of which leads outside."""
    inside: str | Path = item.id.split("://", 1)[-1]
    if isinstance(item, MediumItem) and item.path is not None:
        inside = item.path.relative_to(item.root) if item.root is not None else item.path.name
    *folders, name = str(inside).split("/")
    if not isinstance(item, RequestItem):
        name = name.rpartition(".")[0] or name
    parts = [*folders, name]
    safe = [os.fsdecode(os.fsencode(_NO_NAME.sub("_", part))[:_MOST_BYTES]) for part in parts]
    return "/".join(part for part in safe if part not in ("", ".", "..")) or "caption"
