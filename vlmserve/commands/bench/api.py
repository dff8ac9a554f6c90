"""`vlmserve bench api`: the cost of HTTP, template, tokenizer and detokenizer, beside a fake engine and a real one.

Figures of the fake engine are CPU time of the API process and the detokenizer; the engine and the client do not count.
Figures of the real engine are tokens a second of streamed answers beside the same answers unstreamed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
_EVENT, _HEADERS = b"data: ", {"Content-Type": "application/json"}


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

    with _server(args, ("vlmserve.commands.bench.fake_engine",)) as (url, cpu):

        def cost(count: int, tokens: int, at_a_time: int, *, stream: bool) -> tuple[float, Counted]:
            before = cpu()
            counted = send_all(url, bodies(count, tokens, stream=stream), at_a_time=at_a_time)
            return cpu() - before, counted

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

    The client takes little CPU time: it counts the events, and parses nothing.
    """
    waiting = [json.dumps(body).encode() for body in reversed(asked)]

    def work(connection: http.client.HTTPConnection) -> int:
        events = 0
        with contextlib.closing(connection), contextlib.suppress(IndexError):  # until none is left
            while True:
                connection.request("POST", "/v1/chat/completions", waiting.pop(), _HEADERS)
                response = connection.getresponse()
                content = response.read()
                if response.status != 200:
                    raise EngineError(f"{response.status}: {content[:500].decode(errors='replace')}")
                events += content.count(_EVENT)
        return events

    connections = [http.client.HTTPConnection(urlsplit(url).netloc) for _ in range(min(at_a_time, len(asked)))]
    for connection in connections:
        connection.connect()
    started = time.perf_counter()
    with ThreadPoolExecutor(len(connections)) as threads:
        counts = list(threads.map(work, connections))
    return Counted(wall_s=time.perf_counter() - started, events=sum(counts))
