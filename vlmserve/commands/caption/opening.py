"""Reads an item, makes the request about it, and the record of the answer: the same ones wherever it is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import blake3

from processors.inputs import Modality
from vlmserve.commands.batch.item import ChatRequest, Item, RequestItem, digest_of
from vlmserve.commands.caption.prompts import Prompts, RenderedPrompt
from vlmserve.commands.caption.result import make_record, make_vector_record
from vlmserve.commands.client.media import told_modality
from vlmserve.config.plain_problems import shortened
from vlmserve_common.errors import BadRequestError

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionSettings:
    """Settings of a run. concurrency: items at a time in each engine. bytes_in_memory: limit of their files together.

    options: default fields of requests. picture_knobs, video_knobs: default fields of the part with a medium.
    fingerprint: digest of everything that influences captions. seed: of sampling.
    """

    concurrency: int
    bytes_in_memory: int = 1 << 30
    options: Mapping[str, Any] = field(default_factory=dict)
    picture_knobs: Mapping[str, Any] = field(default_factory=dict)
    video_knobs: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: bytes = b""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedItem:
    """An item after reading. fingerprint: digest of content and prompt. digest: of the medium, in hex."""

    fingerprint: bytes
    request: ChatRequest
    data: bytes | None
    modality: Modality | None
    digest: str | None


def open_item(
    item: Item, asked: RenderedPrompt | None, settings: CaptionSettings, *, prompts: Prompts, model: str
) -> OpenedItem:
    """Read an item. Blocks; may be called in any thread. asked: None for a chat request. model: the one that captions.

    Raises BadRequestError.
    """
    options = {**settings.options}
    data = modality = digest = None
    if isinstance(item, RequestItem):
        request = read_item(item.read)
        if request.model and request.model != model:
            what = f"there is no model {shortened(request.model)!r} here, only {model}"
            raise BadRequestError(what, param="model", code="model_not_found", status=404)
        options |= request.options
        request = replace(request, options=options)
        content = digest_of(request.messages)
    else:
        assert asked is not None
        data = read_item(item.read)
        modality = told_modality(data)
        digest = blake3.blake3(data).hexdigest()
        content = bytes.fromhex(digest)
        options |= item.options
        own = options.get("mm_processor_kwargs") or {}
        of_kinds = {Modality.IMAGE: settings.picture_knobs, Modality.VIDEO: settings.video_knobs}
        knobs = of_kinds.get(modality, {})
        knobs = {name: value for name, value in knobs.items() if name not in own}
        request = prompts.request(asked.prompt, data, modality, knobs=knobs, options=options)
    around = [] if asked is None else asked.texts
    fingerprint = blake3.blake3(settings.fingerprint + content + digest_of([options, around])).digest()
    if "seed" not in options:  # equal items have equal seeds
        seed = (int.from_bytes(fingerprint[:7], "little") + settings.seed) % 2**63
        request = replace(request, options={**options, "seed": seed})
    return OpenedItem(fingerprint=fingerprint, request=request, data=data, modality=modality, digest=digest)


def record_of(
    item: Item, asked: RenderedPrompt | None, opened: OpenedItem, answer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of an item with its answer, a chat.completion. See `open_item` and `make_record`."""
    if "embedding" in answer:
        return make_vector_record(item, answer, digest=opened.digest)
    said = [choice["message"]["content"] or "" for choice in answer["choices"]]
    captions = said if asked is None else [asked.whole(text) for text in said]
    return make_record(item, answer, captions, digest=opened.digest, prompt=None if asked is None else asked.prompt)


def read_item(read: Callable[[], _T]) -> _T:
    """Read, and turn an OSError into the item's own error."""
    try:
        return read()
    except OSError as error:
        raise BadRequestError(f"cannot read it: {error.strerror or error}", code="unreadable") from None
