"""The command line of `vlmserve watch`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from vlmserve.commands.client.live import LiveSession, clock_text
from vlmserve.commands.client.own_server import ChatTarget, model_at, own_model
from vlmserve.commands.watch.source import play
from vlmserve.config.flags import CommandParser, above_zero, positive
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ENV_PREFIX

_API_KEY = ENV_PREFIX + "API_KEY"
_WAITING = 4  # frames; later ones replace the oldest, so that answers are about now
_ABOUT = """\
Watch a video and ask a question about it again and again.

SOURCE is a file, which is played at its speed, a camera of this machine (/dev/video0), or an address that FFmpeg opens
(rtsp://, http://). Without --url, a server of the command's own serves the model, and ends with it.
"""
_EPILOG = """\
examples:
  vlmserve watch clip.mp4 "What is happening?"
  vlmserve watch /dev/video0 "Is somebody at the door? Yes or no." --every 5 --url http://127.0.0.1:8000/v1
  vlmserve watch rtsp://camera/stream "How many cars are there?" --model Qwen/Qwen3-VL-2B-Instruct --keep-seconds 30
"""


def main(argv: Sequence[str]) -> int:
    """Watch until the source ends or the user leaves. Raises VlmserveError if there is no source or no server."""
    args = _parser().parse_args(argv)
    with _served(args) as served, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(args, served))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve watch", usage="%(prog)s SOURCE QUESTION [options]", description=_ABOUT, epilog=_EPILOG
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help=argparse.SUPPRESS)
    add("question", metavar="QUESTION", help=argparse.SUPPRESS)
    add(
        "--every",
        type=above_zero,
        default=2.0,
        metavar="SECONDS",
        help="from one question to the next (default 2)",
    )
    add("--fps", type=above_zero, default=1.0, metavar="N", help="frames used a second, at most (default 1)")
    add("--keep-seconds", type=above_zero, default=60.0, metavar="SECONDS", help="video that is kept (default 60)")
    add(
        "--window",
        choices=["exact", "sliding"],
        default="exact",
        help="sliding: old video leaves at less cost, and answers are near (default exact)",
    )
    add("--max-tokens", type=positive, default=64, metavar="N", help="of an answer (default 64)")
    add("--system", metavar="TEXT", help="a system prompt")
    add("--speed", type=above_zero, default=1.0, metavar="N", help="play a file so many times as fast (default 1)")
    add("--model", default="", metavar="MODEL", help="checkpoint folder or hub id; the built-in model if left out")
    add("--url", metavar="URL", help="use the server at http://host:port/v1 (--model NAME chooses one of its models)")
    add("--api-key", default=os.environ.get(_API_KEY), metavar="KEY", help=f"of that server [env: {_API_KEY}]")
    return parser


@contextlib.contextmanager
def _served(args: argparse.Namespace) -> Iterator[ChatTarget]:
    if args.url is not None:
        yield model_at(args.url, api_key=args.api_key, name=args.model or None)
        return
    words = ["--model", str(resolve_model(args.model, None)), "--served-model-name", args.model] if args.model else []
    with own_model(words) as served:
        yield served


async def _watch(args: argparse.Namespace, served: ChatTarget) -> None:
    live = {"fps": args.fps, "keep_seconds": args.keep_seconds, "window": args.window}
    fields: dict[str, Any] = {"model": served.model, "live": live}
    if args.system is not None:
        fields["system"] = args.system
    asked = {"max_tokens": args.max_tokens, "temperature": 0}
    frames: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
    async with LiveSession(served.client, fields) as session, contextlib.AsyncExitStack() as stack:
        playing = stack.enter_context(_played(args, frames))
        answering = asyncio.create_task(_answer(session, args, asked))
        try:
            told: float | None = None
            while (frame := await frames.get()) is not None:
                if answering.done():
                    answering.result()
                await session.show(*frame)
                told = frame[0]
            await playing
            await session.flush()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        if told is not None:
            last = await session.ask(args.question, **asked)
            _say(told, last)


@contextlib.contextmanager
def _played(
    args: argparse.Namespace, frames: asyncio.Queue[tuple[float, bytes] | None]
) -> Iterator[asyncio.Future[None]]:
    """Play the source in a thread. Its frames come through the queue, and None behind the last one."""
    loop, ended = asyncio.get_running_loop(), threading.Event()

    def put(time: float, file: bytes) -> None:
        if frames.qsize() >= _WAITING:
            frames.get_nowait()
        frames.put_nowait((time, file))

    def take(time: float, file: bytes) -> None:
        loop.call_soon_threadsafe(put, time, file)

    def run() -> None:
        try:
            play(args.source, take, ended, fps=args.fps, speed=args.speed)
        finally:
            loop.call_soon_threadsafe(frames.put_nowait, None)

    try:
        yield loop.run_in_executor(None, run)
    finally:
        ended.set()


async def _answer(session: LiveSession, args: argparse.Namespace, asked: dict[str, Any]) -> None:
    async for one in session.standing(args.question, args.every, **asked):
        _say(one["time"] or 0.0, one["answer"])


def _say(time: float, answer: Any) -> None:
    text = " ".join(answer["choices"][0]["message"]["content"].split())
    print(f"{clock_text(time):>8}  {text}", flush=True)
