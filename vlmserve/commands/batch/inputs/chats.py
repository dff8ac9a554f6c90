"""One chat request of a file, in OpenAI's form or its batch form: to an item."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import blake3

from processors.inputs import Modality
from vlmserve.api.body import checked
from vlmserve.api.protocol import ChatCompletionRequest
from vlmserve.commands.batch.inputs.media import Content, MediaReader
from vlmserve.commands.batch.inputs.source import printable, resolved
from vlmserve.commands.batch.item import ChatRequest, RequestItem
from vlmserve.commands.client.chat_files import named_files, with_files
from vlmserve_common.errors import BadRequestError

_BATCH = {"method": "POST", "url": "/v1/chat/completions"}
# Which model answers, and how answers come, is not a line's to say.
_NOT_OPTIONS = ("model", "messages", "stream", "stream_options")


def is_request(given: Mapping[str, Any]) -> bool:
    """Whether an object is a chat request, by itself or in OpenAI's batch form."""
    return "messages" in given or _is_batch(given)


def request_item(
    given: dict[str, Any], text: bytes, *, place: str, base: str, media: MediaReader, fields: Collection[str] | None
) -> RequestItem:
    """The item of a line. text: of the line. fields: see `open_inputs`. Raises BadRequestError if it has no usable id.

    What else is wrong with it is told when it is read, as it is of files.
    """
    is_batch = _is_batch(given)
    id = given["custom_id"] if is_batch else given.pop("id", None)
    if is_batch and (not isinstance(id, str) or not id):
        raise BadRequestError(f"custom_id is {id!r}; it must be text", code="invalid_line")
    digest, size = blake3.blake3(text), len(text)
    problem: BadRequestError | None = None
    contents: dict[tuple[str, Modality], Content] = {}
    try:
        body = _batch_body(given) if is_batch else given
        if fields is not None:
            body = {name: body[name] for name in fields if name in body}
        messages, options = _checked(body)
        contents = _contents(messages, base, media)
    except BadRequestError as error:
        problem = error
    for content in contents.values():
        digest.update(b"\0" + (content.signature or "").encode("utf-8", "surrogateescape"))
        size += content.size

    def read() -> ChatRequest:
        if problem is not None:
            raise problem
        files: dict[tuple[str, Modality], bytes] = {}
        for param, address, modality in named_files(messages):
            try:
                files[address, modality] = contents[address, modality].read()
            except BadRequestError as error:
                error.param = error.param or param
                raise
        return ChatRequest(messages=with_files(messages, files), options=options)

    id = place if id in (None, "") else printable(str(id))
    return RequestItem(id=id, signature=digest.hexdigest(), size=size, read=read, is_batch=is_batch)


def _is_batch(given: Mapping[str, Any]) -> bool:
    return "body" in given and "custom_id" in given


def _batch_body(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, wanted in _BATCH.items():
        if given.get(name, wanted) != wanted:
            raise BadRequestError(f"{name} is {given[name]!r}; it must be {wanted!r}", param=name)
    if not isinstance(given["body"], dict):
        raise BadRequestError("body must be an object", param="body", code="invalid_type")
    return given["body"]


def _checked(body: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    sent = {"model": "", **body}
    if sent.get("stream_options") is not None and not sent.get("stream"):
        raise BadRequestError("stream_options needs stream: true", param="stream_options", code="invalid_value")
    checked(sent, ChatCompletionRequest)
    return sent["messages"], {name: value for name, value in sent.items() if name not in _NOT_OPTIONS}


def _contents(
    messages: Sequence[Mapping[str, Any]], base: str, media: MediaReader
) -> dict[tuple[str, Modality], Content]:
    contents = {}
    for param, address, modality in named_files(messages):
        try:
            contents[address, modality] = media.open(resolved(address, base), modality)
        except BadRequestError as error:
            error.param = param
            raise
    return contents
