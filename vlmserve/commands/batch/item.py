"""What is to be captioned: one picture, one video or one chat request, named but not read yet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import blake3

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A chat completion request with its files in it.

    messages: OpenAI's form; files are bytes in parts of Qwen's form ({"type": "image", "image": bytes}).
    options: the body's other fields ("max_tokens", "n", "mm_processor_kwargs" ...), but for "model" and "stream".
    """

    messages: Sequence[Message]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediumItem:
    """One picture or video.

    id: its name in outputs, the same in every run, of no two items alike. signature: text that is another one when the
    bytes may have changed, known without reading them; None where only reading tells. size: of the file in bytes, as
    far as it is known. read: its bytes, blocking, to be called in any thread; raises BadRequestError.
    fields: what its prompt may use, and what is kept beside its caption (values are JSON's). prompt: a template of its
    own. options: fields of the request that its source says ("mm_processor_kwargs", ...).
    path: where the file is, if it is a local one. root: the folder of the command line that it was found in.
    """

    id: str
    signature: str | None
    size: int = 0
    read: Callable[[], bytes]
    fields: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    root: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestItem:
    """One chat request as a line of a file has it; its files are read by `read` only. See `MediumItem`.

    is_batch: it came in OpenAI's batch form, and its answer goes out in that form where lines of JSON are written.
    `id` is the line's custom_id then.
    """

    id: str
    signature: str | None
    size: int = 0
    read: Callable[[], ChatRequest]
    is_batch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An item that failed, or something on the way to items that cannot be read: a folder, a line, the rest of a tar.

    id: its name, as an item's. code: a short word ("unreadable", "cut_off", "invalid_line", ...). key: see `Work`; None
    for what was no item yet.
    """

    id: str
    message: str
    code: str | None = "unreadable"
    key: bytes | None = None


Item: TypeAlias = MediumItem | RequestItem
Found: TypeAlias = Item | Failed


def digest_of(value: Any) -> bytes:
    """Of JSON's types and bytes, which count by their content."""

    def plain(part: object) -> object:
        if isinstance(part, bytes):
            return {"blake3": blake3.blake3(part).hexdigest()}
        return str(part)

    return blake3.blake3(json.dumps(value, sort_keys=True, default=plain).encode("utf-8", "surrogatepass")).digest()
