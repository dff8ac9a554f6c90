"""A client that takes next to no CPU time: it counts what comes, and parses nothing (HTTP/1.1 only)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vlmserve_common.errors import EngineError

_END = b"0\r\n\r\n"
_EVENT = b"data: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """wall_s: from the first request sent to the last answer's end. events: server-sent ones, over all answers."""

    wall_s: float
    events: int


def send_all(url: str, path: str, bodies: Sequence[dict[str, Any]], *, at_a_time: int) -> Counted:
    """POST all bodies over so many connections, kept open. EngineError for an answer that is not 200."""
    return asyncio.run(_send_all(url, path, bodies, at_a_time))


async def _send_all(url: str, path: str, bodies: Sequence[dict[str, Any]], at_a_time: int) -> Counted:
    at = urlsplit(url)
    waiting = [_request(at.netloc, path, body) for body in reversed(bodies)]
    connections = [
        await asyncio.open_connection(at.hostname, at.port or 80) for _ in range(min(at_a_time, len(bodies)))
    ]

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        events = 0
        while waiting:
            writer.write(waiting.pop())
            events += await _answer(reader)
        writer.close()
        return events

    started = time.perf_counter()
    counts = await asyncio.gather(*(work(reader, writer) for reader, writer in connections))
    return Counted(wall_s=time.perf_counter() - started, events=sum(counts))


def _request(host: str, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content


async def _answer(reader: asyncio.StreamReader) -> int:
    """How many events it had."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, _, fields = head.partition(b"\r\n")
    length = next((int(f.split(b":")[1]) for f in fields.lower().split(b"\r\n") if f.startswith(b"content-length")), -1)
    if length >= 0:
        body = await reader.readexactly(length)
        if b" 200 " not in status:
            raise EngineError(f"{status.decode()}: {body[:500].decode(errors='replace')}")
        return 0
    events, last = 0, b""
    while not last.endswith(_END):  # of the chunked body; an event cut in two at a read is not counted: they are few
        part = await reader.read(1 << 16)
        if not part:
            raise EngineError("the server closed the connection in the middle of an answer")
        events += part.count(_EVENT)
        last = (last + part)[-len(_END) :]
    return events
