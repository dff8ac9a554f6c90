"""Items: one picture, one video or one chat request, named but not read yet."""

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
    options: the body's other fields ("max_tokens", "n", "mm_processor_kwargs" ...), without "stream". model: the name
    of the model that it wants; None for any.
    """

    messages: Sequence[Message]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MediumItem:
    """One picture or video.

    id: the unique name in outputs, the same in every run. signature: text that differs when the bytes may have changed.
    It is known without reading them; None if only reading tells. size: of the file in bytes; 0 if unknown.
    read: returns the bytes. It blocks, may be called in any thread and raises BadRequestError.
    fields: JSON values that a prompt may use, and that are kept beside the caption. prompt: the item's own template.
    options: fields of the request that the source sets ("mm_processor_kwargs" ...).
    path: of a local file. root: the folder of the command line in which the file was found.
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
    """One chat request, from a line of a file. `read` reads its files. See `MediumItem`.

    is_batch: the line is in OpenAI's batch form, so lines of JSON have the answer in that form. `id` is its custom_id.
    """

    id: str
    signature: str | None
    size: int = 0
    read: Callable[[], ChatRequest]
    is_batch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A failed item, or a part of the inputs that cannot be read: a folder, a line, the rest of a tar.

    id: the name of the item or part. code: a short word ("unreadable", "cut_off", "invalid_line" ...). key: what
    `vlmserve caption` knows the item by; None if there was no item yet.
    """

    id: str
    message: str
    code: str | None = "unreadable"
    key: bytes | None = None


Item: TypeAlias = MediumItem | RequestItem
Found: TypeAlias = Item | Failed


def digest_of(value: Any) -> bytes:
    """Return the digest of a value of JSON's types and bytes."""

    def plain(part: object) -> object:
        if isinstance(part, bytes):
            return {"blake3": blake3.blake3(part).hexdigest()}
        return str(part)

    return blake3.blake3(json.dumps(value, sort_keys=True, default=plain).encode("utf-8", "surrogatepass")).digest()
