"""`vlmserve bench api`: the cost of HTTP, template, tokenizer and detokenizer, beside a fake engine and a real one.

Figures of the fake engine are CPU time of the API process and the detokenizer; the engine and the client do not count.
The longest turn of the API's event loop is how long a request may wait for others.
Figures of the real engine are tokens a second of streamed answers beside the same answers unstreamed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from vlmserve.api.metrics import LONGEST_TURN, PREFIX
from vlmserve.commands.bench.fake_engine import STEP_VARIABLE
from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, show_and_write
from vlmserve.commands.bench.processes import children_of, cpu_time
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.flags import positive
from vlmserve_common.errors import EngineError

_ABOUT = """\
CPU time of a text request's way through the server, and of a streamed token, with a fake engine in place of the model;
and how many tokens a second are left of the built-in model's when its answers are streamed.
"""
_REQUEST_MS, _TOKEN_MS, _RATIO = 3.0, 0.05, 0.85
_TURN_MS = 200.0
_END, _EVENT = b"0\r\n\r\n", b"data: "


def main(argv: Sequence[str]) -> int:
    """Measure, and print a line for each figure."""
    parser = bench_parser("api", _ABOUT, rounds=5)

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=positive, default=default, metavar="N", help=text)

    parser.add_argument("--model", metavar="FOLDER", help="checkpoint folder; the built-in model if left out")
    number("--requests", 200, "unstreamed requests in a round, one at a time")
    number("--streams", 64, "streams at a time")
    number("--tokens", 256, "tokens of each streamed answer")
    number("--step-ms", 10, "a step of the fake engine, which gives each request a token")
    args = parser.parse_args(argv)
    print(f"{args.rounds} rounds; median (least to most)")
    show_and_write(args, {"fake": _fake(args), "real": _real(args)})
    return 0


def _fake(args: argparse.Namespace) -> Iterator[Measure]:
    about = "CPU time of the API process and the detokenizer"

    def figure(name: str, values: Sequence[float], target: float | None, unit: str = "ms") -> Measure:
        return Measure(name=name, unit=unit, spread=Spread.of(values), target=target, bound="at most", about=about)

    turns: list[float] = []
    with _server(args, ("vlmserve.commands.bench.fake_engine",)) as (url, cpu):

        def cost(count: int, tokens: int, at_a_time: int, *, stream: bool) -> tuple[float, Counted]:
            before = cpu()
            counted = send_all(url, bodies(count, tokens, stream=stream), at_a_time=at_a_time)
            seconds = cpu() - before
            turns.append(longest_turn_s(url))
            return seconds, counted

        cost(8, 8, 8, stream=True)
        for at_a_time, words in ((1, "one at a time"), (args.streams, f"{args.streams} at a time")):
            seconds = [cost(args.requests, 1, at_a_time, stream=False)[0] for _ in range(args.rounds)]
            yield figure(f"a text request, {words}", [1e3 * one / args.requests for one in seconds], _REQUEST_MS)
        made = args.streams * args.tokens
        for stream, words in ((False, "unstreamed"), (True, "streamed")):
            found = [cost(args.streams, args.tokens, args.streams, stream=stream) for _ in range(args.rounds)]
            values = [1e3 * seconds / made for seconds, _ in found]
            yield figure(f"a token, {words}, {args.streams} at a time", values, _TOKEN_MS if stream else None)
        yield figure("events a streamed token", [counted.events / made for _, counted in found], None, "")
        yield figure("the longest turn of the event loop", [1e3 * max(turns)], _TURN_MS)


def _real(args: argparse.Namespace) -> Iterator[Measure]:
    with _server(args, ("vlmserve.cli", "serve")) as (url, _):

        def rate(stream: bool) -> float:
            asked = bodies(args.streams, args.tokens, stream=stream)
            return args.streams * args.tokens / send_all(url, asked, at_a_time=args.streams).wall_s

        rate(True)
        rates = [(rate(False), rate(True)) for _ in range(args.rounds)]
    about = f"{args.streams} answers at a time"
    for name, values in (("unstreamed", [whole for whole, _ in rates]), ("streamed", [one for _, one in rates])):
        yield Measure(name=name, unit="tokens/s", spread=Spread.of(values), about=about)
    spread = Spread.of([streamed / whole for whole, streamed in rates])
    yield Measure(name="streamed beside unstreamed, tokens/s", spread=spread, target=_RATIO, about=about)


@contextlib.contextmanager
def _server(args: argparse.Namespace, command: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield a server's address, and the CPU seconds that its API process and its detokenizer have taken."""
    words = [*(["--model", args.model] if args.model else []), "--served-model-name", "bench", "--log-level", "warning"]
    words += ["--max-running-requests", str(max(64, args.streams))]
    with OwnServer(words, {STEP_VARIABLE: str(args.step_ms)}, startup_timeout_s=600.0, command=command) as server:
        named = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in children_of(server.pid)}
        pids = [server.pid, *(pid for pid, name in named.items() if name.startswith("detokenizer"))]
        assert len(pids) == 2, "the API process and one detokenizer"
        yield server.base_url, lambda: sum(map(cpu_time, pids))


def bodies(count: int, tokens: int, *, stream: bool) -> list[dict[str, Any]]:
    """Return questions of about a hundred words that differ from the first word on."""
    words = "What do you see on the picture of the lake, and what may be behind the mountains? " * 6
    return [
        {
            "model": "bench",
            "messages": [{"role": "user", "content": f"{number}: {words}"}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        for number in range(count)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """The server-sent events of all answers. wall_s: from the first request sent to the end of the last answer."""

    wall_s: float
    events: int


def send_all(url: str, asked: Sequence[dict[str, Any]], *, at_a_time: int) -> Counted:
    """POST all chat requests over `at_a_time` connections that stay open. Raises EngineError for a status but 200.

    The client takes next to no CPU time: it speaks HTTP/1.1 only, counts the events, and parses nothing.
    """
    return asyncio.run(_send_all(url, asked, at_a_time))


async def _send_all(url: str, asked: Sequence[dict[str, Any]], at_a_time: int) -> Counted:
    at = urlsplit(url)
    waiting = [_request(at.netloc, body) for body in reversed(asked)]
    connections = [await asyncio.open_connection(at.hostname, at.port) for _ in range(min(at_a_time, len(asked)))]

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        events = 0
        while waiting:
            writer.write(waiting.pop())
            events += await _count_events(reader)
        writer.close()
        return events

    started = time.perf_counter()
    counts = await asyncio.gather(*(work(reader, writer) for reader, writer in connections))
    return Counted(wall_s=time.perf_counter() - started, events=sum(counts))


def longest_turn_s(url: str) -> float:
    """Return the longest turn of the event loop in the last 30 to 60 seconds, as a server's /metrics has it."""
    with urlopen(f"{url}/metrics") as reply:
        page = reply.read().decode()
    return float(next(line for line in page.splitlines() if line.startswith(PREFIX + LONGEST_TURN)).split()[-1])


def _request(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def _count_events(reader: asyncio.StreamReader) -> int:
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
