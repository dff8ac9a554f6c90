"""One chat request of a file, in OpenAI's form or its batch form: to an item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import blake3

from processors.inputs import Modality
from vlmserve.caption.inputs.media import Content, MediaReader
from vlmserve.caption.inputs.source import printable, resolved
from vlmserve.caption.item import ChatRequest, RequestItem
from vlmserve.client.chat_files import named_files, with_files
from vlmserve.server.body import checked
from vlmserve.server.protocol import ChatCompletionRequest
from vlmserve_common.errors import BadRequestError

_URL = "/v1/chat/completions"
# Which model answers, and how answers come, is not a line's to say.
_NOT_OPTIONS = ("model", "messages", "stream", "stream_options")


def is_batch_form(given: Mapping[str, Any]) -> bool:
    """Whether an object is a request in OpenAI's batch form."""
    return "body" in given and "custom_id" in given


def batch_item(given: Mapping[str, Any], text: bytes, *, base: str, media: MediaReader) -> RequestItem:
    """The item of a line in OpenAI's batch form. text: of the line. Raises BadRequestError if it has no usable id."""
    custom_id = given["custom_id"]
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequestError(f"custom_id is {custom_id!r}; it must be text", code="invalid_line")

    def body() -> Mapping[str, Any]:
        for name, wanted in (("method", "POST"), ("url", _URL)):
            if given.get(name, wanted) != wanted:
                raise BadRequestError(f"{name} is {given[name]!r}; it must be {wanted!r}", param=name)
        if not isinstance(given["body"], dict):
            raise BadRequestError("body must be an object", param="body", code="invalid_type")
        return given["body"]

    return _item(body, text, id=printable(custom_id), base=base, media=media, is_batch=True)


def chat_item(given: Mapping[str, Any], text: bytes, *, id: str, base: str, media: MediaReader) -> RequestItem:
    """The item of a line that is a request itself."""
    return _item(lambda: given, text, id=id, base=base, media=media, is_batch=False)


def _item(
    body: Callable[[], Mapping[str, Any]], text: bytes, *, id: str, base: str, media: MediaReader, is_batch: bool
) -> RequestItem:
    """What is wrong with a request is told when it is read, as it is of files."""
    digest = blake3.blake3(text)
    size = len(text)
    read: Callable[[], ChatRequest]
    try:
        messages, options = _checked(body())
        contents = _contents(messages, base, media)
    except BadRequestError as error:
        read = _raising(error)
    else:
        read = _reading(messages, options, contents)
        for content in contents.values():
            digest.update(b"\0" + (content.signature or "").encode("utf-8", "surrogateescape"))
            size += content.size
    return RequestItem(id=id, signature=digest.hexdigest(), size=size, read=read, is_batch=is_batch)


def _checked(body: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
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


def _reading(
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    contents: Mapping[tuple[str, Modality], Content],
) -> Callable[[], ChatRequest]:
    def read() -> ChatRequest:
        files: dict[tuple[str, Modality], bytes] = {}
        for param, address, modality in named_files(messages):
            try:
                files[address, modality] = contents[address, modality].read()
            except BadRequestError as error:
                error.param = error.param or param
                raise
        return ChatRequest(messages=with_files(messages, files), options=options)

    return read


def _raising(error: BadRequestError) -> Callable[[], ChatRequest]:
    def read() -> ChatRequest:
        raise error

    return read
