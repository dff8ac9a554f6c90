"""The events and the object of a Response, made of a chat's chunks as they arrive.

The output is a list of items: reasoning, a message, calls of functions, in the order in which they begin. One item is
open at a time; it ends when another kind of text begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmserve.api.request_id import new_id

# kind of an item -> of the deltas of its text, and how its id begins
_DELTAS = {
    "message": ("response.output_text", "msg"),
    "reasoning": ("response.reasoning_text", "rs"),
    "function_call": ("response.function_call_arguments", "fc"),
}


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written. call: the index of the chat's call."""

    kind: str
    id: str
    index: int
    call: int | None = None
    call_id: str = ""
    name: str = ""
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """Return the content of a message, or of reasoning, so far."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": "".join(self.text)}
        return {"type": "output_text", "text": "".join(self.text), "annotations": [], "logprobs": self.logprobs}

    def as_item(self, status: str) -> dict[str, Any]:
        """Return the item of the output. It has no content when it begins."""
        started = status != "in_progress"
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "message":
            return item | {"role": "assistant", "content": [self.part()] if started else []}
        if self.kind == "reasoning":
            return item | {"summary": [], "content": [self.part()] if started else []}
        return item | {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.text)}


class ResponseWriter:
    """Writes one response. base: the fields that repeat its request."""

    def __init__(self, base: Mapping[str, Any]) -> None:
        self._base = base
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self._extra: dict[str, Any] = {}
        self._held: list[dict[str, Any]] = []  # logprobs that come before their text

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events before all output."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._object("in_progress"))

    def take(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chunk of the chat, which has one choice."""
        if "error" in chunk:
            self._error = chunk["error"]
            return
        self._usage = chunk.get("usage") or self._usage
        self._extra |= {name: chunk[name] for name in ("warnings", "mm_report", "timings") if name in chunk}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._finish = choice.get("finish_reason") or self._finish
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield from self._text("reasoning", thought)
            for call in delta.get("tool_calls") or ():
                yield from self._called(call)
            if not (thought or delta.get("tool_calls")):
                listed = (choice.get("logprobs") or {}).get("content") or []
                yield from self._said(delta.get("content") or "", listed)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the events after all output, except the last one, which has `response`."""
        if self._open is None and not self._output and self._error is None:
            yield from self._begin_item("message")
            if self._held:
                yield from self._delta("", self._held)
        yield from self._close()

    def response(self) -> dict[str, Any]:
        """Return the whole response, after all chunks."""
        return self._object(self._status())

    def last(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """Return the last event."""
        return self._event(f"response.{response['status']}", response=response)

    def _status(self) -> str:
        return "failed" if self._error else "incomplete" if self._finish == "length" else "completed"

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield from self._begin_item(kind)
        yield from self._delta(text, logprobs or [])

    def _said(self, text: str, listed: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events of a message's text. listed: the logprobs of its tokens.

        Text that is held back comes as logprobs only. They wait for the message to begin, since that text may be a
        thought or a call.
        """
        if text or (listed and self._open is not None and self._open.kind == "message"):
            yield from self._text("message", text, [*self._held, *listed])
            self._held = []
        else:
            self._held += listed

    def _called(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call.get("function") or {}
        if self._open is None or self._open.call != call["index"]:
            yield from self._close()
            call_id = call.get("id") or new_id("call")
            yield from self._begin_item(
                "function_call", call=call["index"], call_id=call_id, name=function.get("name") or ""
            )
        if function.get("arguments"):
            yield from self._delta(function["arguments"], [])

    def _begin_item(self, kind: str, **call: Any) -> Iterator[dict[str, Any]]:
        self._held = self._held if kind == "message" else []
        item_id = new_id(_DELTAS[kind][1]).replace("-", "_")
        item = self._open = _OpenItem(kind, item_id, len(self._output), **call)
        yield self._event("response.output_item.added", output_index=item.index, item=item.as_item("in_progress"))
        if kind != "function_call":
            yield self._of_item("response.content_part.added", content_index=0, part=item.part())

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        item = self._open
        assert item is not None
        item.text.append(text)
        item.logprobs += logprobs
        rest = {"logprobs": logprobs} if item.kind == "message" else {}
        yield self._of_item(f"{_DELTAS[item.kind][0]}.delta", **self._content(item), delta=text, **rest)

    def _close(self) -> Iterator[dict[str, Any]]:
        item = self._open
        if item is None:
            return
        name, text = _DELTAS[item.kind][0], "".join(item.text)
        if item.kind == "function_call":
            yield self._of_item(f"{name}.done", arguments=text, name=item.name)
        else:
            rest = {"logprobs": item.logprobs} if item.kind == "message" else {}
            yield self._of_item(f"{name}.done", content_index=0, text=text, **rest)
            yield self._of_item("response.content_part.done", content_index=0, part=item.part())
        done = item.as_item("incomplete" if self._status() in ("incomplete", "failed") else "completed")
        self._output.append(done)
        yield self._event("response.output_item.done", output_index=item.index, item=done)
        self._open = None

    @staticmethod
    def _content(item: _OpenItem) -> dict[str, Any]:
        return {} if item.kind == "function_call" else {"content_index": 0}

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=self._open.index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _object(self, status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._base,
            **self._extra,
            "status": status,
            "error": None if self._error is None else _error(self._error),
            "incomplete_details": cut,
            "output": list(self._output),
            "usage": None if self._usage is None else _usage(self._usage),
        }


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    known = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
    return {"code": known.get(error["type"], "server_error"), "message": error["message"]}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    of_answer = usage.get("completion_tokens_details") or {}
    of_prompt = usage.get("prompt_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **of_prompt},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **of_answer},
        "total_tokens": usage["total_tokens"],
        **{name: usage[name] for name in ("timings", "spec_tokens_details") if name in usage},
    }
