"""`vlmserve bench api`: what HTTP, template, tokenizer and detokenizer cost, beside a fake engine and a real one.

CPU time of the API process and the detokenizer, so the engine and the client do not count. With the real engine: tokens
a second of answers that are streamed beside the same answers unstreamed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmserve.commands.bench.api_subject import STEP_VARIABLE
from vlmserve.commands.bench.counting_client import Counted, send_all
from vlmserve.commands.bench.interleaved import Spread
from vlmserve.commands.bench.processes import children_of, cpu_time
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.flags import CommandParser
from vlmserve.config.number_words import positive

_ABOUT = """\
CPU time of a text request's way through the server, and of a streamed token, with a fake engine in place of the model;
and how many tokens a second are left of the built-in model's when its answers are streamed.
"""
_CHATS = "/v1/chat/completions"
_REQUEST_MS, _TOKEN_MS, _RATIO = 3.0, 0.05, 0.85
_NAMES = ("api", "detokenizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One result over rounds. target: what it may be at most; at least where `least`."""

    name: str
    unit: str
    spread: Spread
    target: float | None = None
    least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.spread.median >= self.target if self.least else self.spread.median <= self.target

    def __str__(self) -> str:
        aim = ""
        if self.target is not None:
            bound = "at least" if self.least else "at most"
            aim = f"; target: {bound} {self.target:g}, {'met' if self.met else 'missed'}"
        return f"  {self.name:<52} {self.spread.shown('.4f', f' {self.unit}')}{aim}"


def main(argv: Sequence[str]) -> int:
    """Measure; prints a line a figure, and with --json writes them all."""
    args = _parser().parse_args(argv)
    print(f"CPU time of the API process and the detokenizer; {args.rounds} rounds; median (least to most)")
    figures = [*_fake(args), *_real(args)]
    if args.json:
        found = [{**asdict(figure), "met": figure.met} for figure in figures]
        Path(args.json).write_text(json.dumps({"settings": vars(args), "figures": found}, indent=2) + "\n")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="vlmserve bench api", description=_ABOUT)

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=positive, default=default, metavar="N", help=f"{text} [default: %(default)s]")

    parser.add_argument("--model", metavar="FOLDER", help="checkpoint folder [default: the built-in model]")
    number("--rounds", 5, "measurements of each figure")
    number("--requests", 200, "unstreamed requests in a round, one at a time")
    number("--streams", 64, "streams at a time")
    number("--tokens", 256, "tokens of each streamed answer")
    number("--step-ms", 10, "a step of the fake engine, which gives each request a token")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    return parser


def _fake(args: argparse.Namespace) -> Iterator[Figure]:
    with _server(args, ("vlmserve.commands.bench.api_subject", "serve"), args.step_ms) as (url, cpu):

        def cost(count: int, tokens: int, at_a_time: int, *, stream: bool) -> tuple[float, Counted]:
            before = cpu()
            counted = send_all(url, _CHATS, _bodies(count, tokens, stream=stream), at_a_time=at_a_time)
            return cpu() - before, counted

        cost(8, 8, 8, stream=True)
        rounds = [cost(args.requests, 1, 1, stream=False)[0] / args.requests for _ in range(args.rounds)]
        yield _shown("a text request, one at a time", "ms", [1e3 * one for one in rounds], _REQUEST_MS)
        rounds = [cost(args.requests, 1, args.streams, stream=False)[0] / args.requests for _ in range(args.rounds)]
        yield _shown(f"a text request, {args.streams} at a time", "ms", [1e3 * one for one in rounds], _REQUEST_MS)
        made = args.streams * args.tokens
        for stream, words in ((False, "unstreamed"), (True, "streamed")):
            found = [cost(args.streams, args.tokens, args.streams, stream=stream) for _ in range(args.rounds)]
            times = [1e3 * seconds / made for seconds, _ in found]
            yield _shown(f"a token, {words}, {args.streams} at a time", "ms", times, _TOKEN_MS if stream else None)
        yield _shown("events a streamed token", "", [counted.events / made for _, counted in found])


def _real(args: argparse.Namespace) -> Iterator[Figure]:
    with _server(args, ("vlmserve.cli", "serve"), args.step_ms) as (url, _):

        def rate(stream: bool) -> float:
            bodies = _bodies(args.streams, args.tokens, stream=stream)
            return args.streams * args.tokens / send_all(url, _CHATS, bodies, at_a_time=args.streams).wall_s

        rate(True)
        rates = [(rate(False), rate(True)) for _ in range(args.rounds)]
        name = f"{args.streams} answers of the real engine"
        yield _shown(f"{name}, unstreamed", "tokens/s", [whole for whole, _ in rates])
        yield _shown(f"{name}, streamed", "tokens/s", [streamed for _, streamed in rates])
        ratios = [streamed / whole for whole, streamed in rates]
        yield _shown("streamed beside unstreamed, tokens/s", "x", ratios, _RATIO, least=True)


def _shown(
    name: str, unit: str, values: Sequence[float], target: float | None = None, *, least: bool = False
) -> Figure:
    figure = Figure(name=name, unit=unit, spread=Spread.of(values), target=target, least=least)
    print(figure, flush=True)
    return figure


@contextmanager
def _server(
    args: argparse.Namespace, command: tuple[str, str], step_ms: int
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Its address, and the seconds of CPU time that its API process and its detokenizer have taken."""
    words = [*([args.model] if args.model else []), "--served-model-name", "bench", "--log-level", "warning"]
    words += ["--max-running-requests", str(max(64, args.streams))]
    with OwnServer(words, {STEP_VARIABLE: str(step_ms)}, startup_timeout_s=600.0, command=command) as server:
        pids = [server.pid, *(pid for pid in children_of(server.pid) if _name(pid).startswith("detokenizer"))]
        assert len(pids) == len(_NAMES)
        yield server.base_url, lambda: sum(map(cpu_time, pids))


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def _bodies(count: int, tokens: int, *, stream: bool) -> list[dict[str, Any]]:
    """Questions of about a hundred words, each unlike the others from its beginning."""
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
