"""`vlmserve bench live`: what a second of live video costs late and early, a question about it, several cameras, and
one camera for long.

A second's cost is the CPU time of all processes of the server (with --url, the time that passes). A question is
compared with one behind a text of as many tokens, on the same server. A camera's lag is the time from
sending the second frame of a temporal patch until the server says that it is in the conversation.

The soak (`--parts soak`) is one camera whose last minute several viewers ask about. A frame's age is the time from
sending the last one before a question until the first token of the answer, which sees that frame.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, ratios, show_and_write
from vlmserve.commands.bench.media import draw_picture
from vlmserve.commands.bench.processes import MIB, children_of, cpu_time
from vlmserve.commands.bench.soak import take_sample
from vlmserve.commands.client.chat_client import ChatClient, ServerError
from vlmserve.commands.client.live import LiveSession
from vlmserve.commands.client.own_server import model_at, own_model
from vlmserve.config.flags import positive

_ABOUT = """\
Live video: the cost of the 60th second beside that of the 2nd, the first token of a question about it beside that of a
question about text, and the lag of several cameras that send a frame a second each. `--parts soak` is left out unless
you name it: one camera for ten minutes, whose viewers ask all the time; does memory grow, and are answers about now?
"""
Clock: TypeAlias = Callable[[], float]
_USUAL = ("seconds", "question", "cameras")
_LATE, _QUESTION, _LAG_S, _GROWN = 1.3, 1.2, 2.0, 1.1
_SOAKED = ("--processor-cache-mib", "16", "--encoder-cache-mib", "16", "--max-total-tokens", "16384")
"""Caches that are full within the first minute: what grows after that is no cache."""
_WINDOW_S = 60
_LOOK_EVERY_S = 10.0
_NOWHERE = Path("/nowhere")  # temporary files are not looked at
_NEAR = 5
"""Seconds around the 2nd and the last one, of which the median counts."""
_WORDS = "the lake mountains and behind a red blue picture of what near in it small large two house green sky"


def main(argv: Sequence[str]) -> int:
    """Measure, and print a line for each figure."""
    parser = bench_parser("live", _ABOUT, rounds=3, parts=(*_USUAL, "soak"))
    parser.set_defaults(parts=list(_USUAL))

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=positive, default=default, metavar="N", help=text)

    parser.add_argument("--model", metavar="FOLDER", help="checkpoint folder; the built-in model if left out")
    parser.add_argument("--url", metavar="URL", help="a server that runs already, in place of one of its own")
    number("--seconds", 60, "seconds of the video")
    number("--side", 224, "side of its frames in pixels")
    number("--asked", 15, "questions in a round")
    number("--cameras", 8, "cameras")
    number("--camera-seconds", 20, "seconds that each of them sends frames")
    number("--soak-seconds", 600, "seconds of the soak; memory is compared from the first minute on")
    number("--viewers", 8, "viewers of the soak's camera, who ask one question after the other")
    number("--viewer-pause", 2, "seconds from a viewer's answer to the next question")
    text = "of the last minute: see docs/live.md"
    parser.add_argument("--window", choices=["exact", "sliding"], default="exact", help=text)
    args = parser.parse_args(argv)
    print(f"{args.rounds} rounds; median (least to most)")
    looks: list[dict[str, Any]] = []
    with _server(args) as (client, clock, pid):
        made = {
            "seconds": lambda: _seconds(args, client, clock),
            "question": lambda: _question(args, client),
            "cameras": lambda: _cameras(args, client),
            "soak": lambda: _soak(args, client, pid, looks),
        }
        show_and_write(args, {part: made[part]() for part in args.parts}, looks=looks)
    return 0


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[ChatClient, Clock, int | None]]:
    """Yield a client of the server, what counts the seconds that it takes, and its process, if it is ours."""
    if args.url is not None:
        yield model_at(args.url, api_key=None).client, time.perf_counter, None
        return
    words = ["--model", args.model] if args.model else []
    with own_model([*words, *(_SOAKED if "soak" in args.parts else ())]) as served:
        assert served.server is not None
        pid = served.server.pid
        yield served.client, lambda: sum(map(cpu_time, [pid, *children_of(pid)])), pid


class _Camera:
    """Frames that no cache knows."""

    numbers = iter(range(10**9))

    def __init__(self, side: int) -> None:
        self._side = side

    def frame(self) -> bytes:
        return draw_picture(self._side, [3, next(self.numbers)])


def _live(fps: float = 2.0) -> dict[str, Any]:
    return {"live": {"fps": fps}}


async def _shown(client: ChatClient, args: argparse.Namespace, seconds: int, clock: Clock) -> list[float]:
    """Return what each second of two frames costs, in seconds, until it is computed."""
    camera, costs = _Camera(args.side), []
    async with LiveSession(client, _live()) as session:
        for second in range(seconds):
            frames = [camera.frame(), camera.frame()]
            began = clock()
            for number, frame in enumerate(frames):
                await session.show(second + number / 2, frame)
            await session.flush()
            costs.append(clock() - began)
    return costs


def _seconds(args: argparse.Namespace, client: ChatClient, clock: Clock) -> Iterator[Measure]:
    asyncio.run(_shown(client, args, 4, clock))
    rounds = [asyncio.run(_shown(client, args, args.seconds, clock)) for _ in range(args.rounds)]
    early = [statistics.median(costs[1 : 1 + _NEAR]) for costs in rounds]
    late = [statistics.median(costs[-_NEAR:]) for costs in rounds]
    what = "CPU time of the server" if args.url is None else "seconds that pass"
    about = f"{what} for {args.seconds} s of two frames of {args.side}x{args.side} a second, one after the other"
    for name, values in (("the 2nd second", early), ("the last second", late)):
        yield Measure(name=name, unit="ms", spread=Spread.of(values, 1e3), about=about)
    yield Measure(
        name="the last beside the 2nd", spread=ratios(late, early), target=_LATE, bound="at most", about=about
    )


async def _first_token_s(session: LiveSession, question: str) -> float:
    began = time.perf_counter()
    async with contextlib.aclosing(session.stream(question, max_tokens=1, temperature=0)) as chunks:
        async for chunk in chunks:
            if chunk["choices"] and chunk["choices"][0].get("finish_reason"):
                break
    return time.perf_counter() - began


async def _asked(client: ChatClient, args: argparse.Namespace) -> tuple[list[float], list[float], int]:
    """Return the seconds to the first token of questions about video, and about as much text, in turns."""
    camera = _Camera(args.side)
    async with LiveSession(client, _live()) as video, LiveSession(client, {}) as text:
        for second in range(args.seconds):
            for number in range(2):
                await video.show(second + number / 2, camera.frame())
        tokens = (await video.flush())["tokens"]
        await _fill(text, tokens)
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(args.asked + 1):
            for session, times in zip((video, text), found, strict=True):
                times.append(await _first_token_s(session, f"{number}: What is there to be seen now?"))
    return found[0][1:], found[1][1:], tokens


async def _fill(session: LiveSession, tokens: int) -> None:
    """Append about so many tokens of text."""
    rng, there = np.random.default_rng(5), 0
    while there < tokens * 0.98:
        words = " ".join(rng.choice(_WORDS.split(), max(1, (tokens - there) // 2)).tolist()) + " "
        there = (await session.append(words))["usage"]["prompt_tokens"]


def _question(args: argparse.Namespace, client: ChatClient) -> Iterator[Measure]:
    found = [asyncio.run(_asked(client, args)) for _ in range(args.rounds)]
    video, text = [statistics.median(one[0]) for one in found], [statistics.median(one[1]) for one in found]
    about = f"questions about {args.seconds} s of video, {found[0][2]} tokens, and about as many tokens of text"
    for name, values in (("first token, about video", video), ("first token, about text", text)):
        yield Measure(name=name, unit="ms", spread=Spread.of(values, 1e3), about=about)
    yield Measure(
        name="about video beside text", spread=ratios(video, text), target=_QUESTION, bound="at most", about=about
    )


async def _watched(client: ChatClient, args: argparse.Namespace, number: int) -> list[float]:
    """Return the lag of each temporal patch of one camera, in seconds."""
    camera, lags = _Camera(args.side), list[float]()
    frames = [camera.frame() for _ in range(args.camera_seconds)]
    async with LiveSession(client, _live(fps=1.0)) as session:
        began = time.perf_counter() + number / args.cameras
        for second, frame in enumerate(frames):
            await asyncio.sleep(max(0.0, began + second - time.perf_counter()))
            sent = time.perf_counter()
            await session.show(float(second), frame)
            if second % 2:
                lags.append(sent)
        done = await session.flush()
        assert done["done"] == args.camera_seconds // 2 * 2, done
        return [session.arrived[place] - sent for place, sent in enumerate(lags)]


async def _all_watched(client: ChatClient, args: argparse.Namespace) -> list[float]:
    found = await asyncio.gather(*(_watched(client, args, number) for number in range(args.cameras)))
    return [lag for lags in found for lag in lags]


def _cameras(args: argparse.Namespace, client: ChatClient) -> Iterator[Measure]:
    lags = asyncio.run(_all_watched(client, args))
    about = f"{args.cameras} cameras, a frame of {args.side}x{args.side} a second each, for {args.camera_seconds} s"
    yield Measure(name="lag of a temporal patch", unit="s", spread=Spread.of(lags), about=about)
    yield Measure(
        name="the longest lag", unit="s", spread=Spread.of([max(lags)]), target=_LAG_S, bound="at most", about=about
    )


class _Soak:
    """One camera and its viewers. ages, lags: in seconds, see the top. failures: why questions failed. pss: bytes by
    the name of the process, for each look at the server."""

    def __init__(self, args: argparse.Namespace, client: ChatClient, pid: int | None) -> None:
        self._args, self._client, self._pid = args, client, pid
        self._sent = 0.0
        self.ages: list[float] = []
        self.lags: list[float] = []
        self.failures: list[str] = []
        self.pss: list[tuple[float, dict[str, int]]] = []

    async def run(self) -> None:
        args = self._args
        live = {"live": {"fps": 2.0, "keep_seconds": _WINDOW_S, "window": args.window}}
        async with LiveSession(self._client, live) as session, asyncio.TaskGroup() as tasks:
            began = time.perf_counter()
            ends = began + args.soak_seconds
            for number in range(args.viewers):
                tasks.create_task(self._view(session, number, ends))
            tasks.create_task(self._look(began, ends))
            sent = await self._play(session, began, ends)
            await session.flush()
            self.lags = [done - one for one, done in zip(sent, session.arrived, strict=True)]

    async def _play(self, session: LiveSession, began: float, ends: float) -> list[float]:
        """Send two frames a second. Returns when each second one of two was sent."""
        camera, sent, number = _Camera(self._args.side), list[float](), 0
        while (due := began + number / 2) < ends:
            frame = await asyncio.to_thread(camera.frame)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._sent = time.perf_counter()
            await session.show(number / 2, frame)
            if number % 2:
                sent.append(self._sent)
            number += 1
        return sent

    async def _view(self, session: LiveSession, number: int, ends: float) -> None:
        await asyncio.sleep(1 + number / self._args.viewers)
        asked = 0
        while time.perf_counter() < ends:
            newest, asked = self._sent, asked + 1
            try:
                await _first_token_s(session, f"{number}.{asked}: What is there to be seen now?")
                self.ages.append(time.perf_counter() - newest)
            except ServerError as error:
                self.failures.append(str(error))
            await asyncio.sleep(self._args.viewer_pause)

    async def _look(self, began: float, ends: float) -> None:
        while self._pid is not None and time.perf_counter() < ends:
            sample = await asyncio.to_thread(take_sample, self._pid, _NOWHERE, 0)
            self.pss.append((time.perf_counter() - began, sample.pss))
            await asyncio.sleep(min(_LOOK_EVERY_S, self._args.soak_seconds / 10, max(0.0, ends - time.perf_counter())))


def _soak(
    args: argparse.Namespace, client: ChatClient, pid: int | None, looks: list[dict[str, Any]]
) -> Iterator[Measure]:
    """Yield the figures of a soak. looks: gets the seconds and the bytes of each look at the server's memory."""
    soak = _Soak(args, client, pid)
    asyncio.run(soak.run())
    looks += [{"seconds": at, "pss": pss} for at, pss in soak.pss]
    about = (
        f"a camera, 2 frames of {args.side}x{args.side} a second for {args.soak_seconds} s, of which the last "
        f"{_WINDOW_S} s stay ({args.window}); {args.viewers} viewers, {len(soak.ages)} questions, {len(soak.failures)} "
        f"failed{': ' + soak.failures[0] if soak.failures else ''}"
    )
    for name, values in (("lag of a temporal patch", soak.lags), ("age of the newest frame in an answer", soak.ages)):
        yield Measure(name=name, unit="s", spread=Spread.of(values), about=about)
        high = float(np.percentile(values, 99))
        yield Measure(name=f"{name}, 99th of 100", unit="s", spread=Spread.of([high]), about=about)
    for name, value, unit, target in (
        ("the oldest of these", max(soak.ages), "s", _LAG_S),
        ("failed questions", float(len(soak.failures)), "", 0.0),
    ):
        yield Measure(name=name, unit=unit, spread=Spread.of([value]), target=target, bound="at most", about=about)
    late = [pss for at, pss in soak.pss if at >= min(_WINDOW_S, args.soak_seconds / 2)]
    if not late:
        return
    for name in sorted(late[-1]):
        for when, looks in (("after a minute", late[:_NEAR]), ("at the end", late[-_NEAR:])):
            sizes = Spread.of([one.get(name, 0) for one in looks], 1 / MIB)
            yield Measure(name=f"memory of {name} {when}", unit="MiB", spread=sizes, about=about)
    sums = [sum(one.values()) for one in late]
    end = statistics.median(sums[-_NEAR:]) / statistics.median(sums[:_NEAR])
    yield Measure(
        name="memory at the end beside that after a minute",
        spread=Spread.of([end]),
        target=_GROWN,
        bound="at most",
        about=about,
    )
