"""`vlmserve bench caption`: captions from files to lines of JSON, beside the engine alone with the same pictures.

Both sides use one engine in turns. The engine alone has its pictures in memory, and its answers are thrown away. The
difference is the time for reading, hashing, the journal, the output and the display. Pictures differ by a shade from
pass to pass, so no cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vlmserve.commands.bench.figures import bench_parser, ratios, write_json
from vlmserve.commands.caption.command import CaptionCommand, read_command
from vlmserve.commands.caption.local import LocalCaptioner
from vlmserve.commands.caption.run import Captioner
from vlmserve.commands.caption.session import Ended, caption
from vlmserve.frontend.request_builder import ChatPrompt, GenerateReqInput
from vlmserve.ipc.messages import SamplingParams
from vlmserve_common.errors import EngineError

_COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")
_SIDE = 224


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, and print a table."""
    text = "Captions from files, journal and all, beside the engine alone with the same pictures."
    parser = bench_parser("caption", text, epilog="Flags after -- go to `vlmserve caption`, a MODEL too.")
    add = parser.add_argument
    add("--items", type=int, default=1000, help="pictures, drawn, of 224 x 224 pixels")
    add("--rounds", type=int, default=3, help="rounds in which both sides take turns; 0 leaves this part out")
    text = "also: the peak memory of the command with these numbers of items, e.g. 1000 20000, of one token each"
    add("--memory-items", type=int, nargs="*", default=[], help=text)
    add("--dir", help="folder for pictures and outputs (default: the system's for temporary files)")
    add("caption_flags", nargs="*", metavar="-- FLAGS", help="flags for vlmserve caption")
    args = parser.parse_args(argv)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-", dir=args.dir) as folder:
        if args.rounds:
            figures["throughput"] = _throughput(Path(folder), args)
        if args.memory_items:
            figures["memory"] = _memory(Path(folder), args)
    write_json(args, figures)
    return 0


def _throughput(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    command = read_command([*args.caption_flags, str(folder / "none"), "--output", str(folder / "none.jsonl")])
    captioner = LocalCaptioner(
        command.settings, concurrency=command.run.concurrency, nothing_twice=command.nothing_twice
    )
    alone: list[tuple[float, int]] = []
    whole: list[tuple[float, int]] = []
    try:
        for number in range(args.rounds + 1):
            pictures = draw_pictures(folder / f"engine-{number}", args.items, shade=2 * number)
            alone.append(_engine(captioner, command, pictures))
            pictures = draw_pictures(folder / f"caption-{number}", args.items, shade=2 * number + 1)
            whole.append(caption_files(captioner, args.caption_flags, pictures))
    finally:
        asyncio.run(captioner.close())
    del alone[0], whole[0]  # to warm up
    for name, rounds in (("engine alone", alone), ("vlmserve caption", whole)):
        rates = ", ".join(f"{args.items / seconds:.1f}" for seconds, _ in rounds)
        print(f"{name:18} {rates} items/s; tokens of a round: {', '.join(str(tokens) for _, tokens in rounds)}")
    ratio = ratios([seconds for seconds, _ in alone], [seconds for seconds, _ in whole])
    print(f"throughput of vlmserve caption, of the engine alone's: {ratio}")
    return {"engine_s_and_tokens": alone, "caption_s_and_tokens": whole, "ratio": astuple(ratio)}


def _engine(captioner: LocalCaptioner, command: CaptionCommand, folder: Path) -> tuple[float, int]:
    """Return the seconds and tokens of all pictures from memory, with the command's concurrency."""
    pictures = [path.read_bytes() for path in sorted(folder.iterdir())]
    sampling = SamplingParams(max_new_tokens=command.run.options["max_tokens"], temperature=0.0)
    tokens = 0

    async def ask(number: int, room: asyncio.Semaphore) -> None:
        nonlocal tokens
        content = [{"type": "image", "image": pictures[number]}, {"type": "text", "text": command.prompt}]
        prompt = ChatPrompt(messages=[{"role": "user", "content": content}])
        request = GenerateReqInput(request_id=f"bench-{number}", prompt=prompt, sampling_params=sampling)
        async with room, contextlib.aclosing(captioner.llm.generate(request)) as outputs:
            async for output in outputs:
                tokens += len(output.output.token_ids)

    async def ask_all() -> None:
        room = asyncio.Semaphore(command.run.concurrency)
        await asyncio.gather(*(ask(number, room) for number in range(len(pictures))))

    started = time.perf_counter()
    asyncio.run(ask_all())
    return time.perf_counter() - started, tokens


def caption_files(captioner: Captioner, flags: Sequence[str], folder: Path) -> tuple[float, int]:
    """Caption a folder of pictures with a captioner that is ready. Returns the seconds, and the tokens of captions."""
    output = folder.with_suffix(".jsonl")
    command = read_command([*flags, str(folder), "--output", str(output)])
    started = time.perf_counter()
    outcome = caption(command, io.BytesIO(), sys.stderr, captioner=captioner)
    seconds = time.perf_counter() - started
    if outcome.how is not Ended.FINISHED or outcome.tally.done != sum(1 for _ in folder.iterdir()):
        raise EngineError(f"the run did not caption everything: {outcome.summary}")
    return seconds, outcome.tally.completion_tokens


def _memory(folder: Path, args: argparse.Namespace) -> dict[str, int]:
    """Return the peak memory of the command, by the number of items."""
    return {str(count): peak_memory(folder, count, args.caption_flags) for count in args.memory_items}


def peak_memory(folder: Path, count: int, flags: Sequence[str]) -> int:
    """Caption small pictures with a token each; return the peak memory of the command without its other processes, in
    bytes."""
    pictures = draw_pictures(folder / f"memory-{count}", count, shade=0, side=64)
    output = pictures.with_suffix(".jsonl")
    words = [*flags, str(pictures), "--output", str(output), "--max-tokens", "1"]
    command = [sys.executable, "-m", "vlmserve.cli", "caption", *words, "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise EngineError(f"vlmserve caption {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    process.returncode = 0  # it has been waited for
    print(f"{count} items: peak memory {usage.ru_maxrss / 1024:.0f} MiB")
    return usage.ru_maxrss * 1024


def draw_pictures(folder: Path, count: int, *, shade: int, side: int = _SIDE) -> Path:
    """Draw pictures of shapes into a new folder, no two alike. shade: distance of the background from white."""
    folder.mkdir()
    for number in range(count):
        dice = random.Random(number)
        picture = Image.new("RGB", (side, side), (255 - shade,) * 3)
        draw = ImageDraw.Draw(picture)
        for _ in range(dice.randint(1, 4)):
            size = dice.randint(side // 10, side // 4)
            x, y = dice.randint(0, side - size), dice.randint(0, side - size)
            shape = draw.ellipse if dice.random() < 0.5 else draw.rectangle
            shape((x, y, x + size, y + size), fill=dice.choice(_COLOURS))
        picture.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))  # no two alike
        picture.save(folder / f"{number:06d}.png", compress_level=1)
    return folder
