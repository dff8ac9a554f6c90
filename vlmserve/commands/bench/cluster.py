"""`vlmserve bench cluster`: what a Ray cluster costs, on one machine.

An actor's engine is that of `vlmserve caption`. What is compared is the way there: pictures and answers go through Ray.
The sides take turns; their pictures differ by a shade, so no cache helps. All parts start a cluster of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vlmserve.commands.bench.caption import caption_files, draw_pictures, peak_memory
from vlmserve.commands.bench.cluster_serve import serve_measures
from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, ratios, show_and_write
from vlmserve.commands.bench.processes import MIB
from vlmserve.commands.caption.command import CaptionCommand, read_command
from vlmserve.commands.caption.local import LocalCaptioner
from vlmserve.commands.caption.on_ray import RayCaptioner, RaySettings
from vlmserve.commands.caption.rows import Captioner
from vlmserve.config.flags import positive
from vlmserve.ray.cluster import OWN, Cluster
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.errors import EngineError

_RATIO, _FLAT = 0.9, 1.1
_WARM_UP = 16


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its figures."""
    text = "What Ray costs on one machine: captions by one actor, beside `vlmserve caption` on the same pictures."
    epilog = "Flags after -- go to `vlmserve caption`, a MODEL too."
    parser = bench_parser("cluster", text, rounds=3, parts=_PARTS, epilog=epilog)
    add = parser.add_argument
    add("--items", type=positive, default=1000, metavar="N", help="pictures of a round, drawn, of 224 x 224 pixels")
    text = "two numbers of small pictures, of one token each, for the peak memory of this side of the cluster"
    add("--memory-items", type=positive, nargs=2, default=[2000, 20000], metavar="N", help=text)
    add("caption_flags", nargs="*", metavar="-- FLAGS", help="flags for vlmserve caption")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        show_and_write(args, {part: _PARTS[part](Path(folder), args) for part in args.parts})
    return 0


# ---------------------------------------------------------------- captions, and Ray Data


def _captions(folder: Path, args: argparse.Namespace) -> Iterator[Measure]:
    """Measure an actor of `vlmserve caption --ray`, and one of `map_batches`, beside the command without them."""
    command = read_command([*args.caption_flags, str(folder), "--output", str(folder / "none.jsonl")])
    engine = command.settings.engine  # all sides compute with as many threads
    engine = replace(engine, num_threads=engine.num_threads or available_cpus())
    command = replace(command, settings=replace(command.settings, engine=engine))
    how: dict[str, Any] = {"concurrency": command.run.concurrency, "nothing_twice": command.nothing_twice}
    with ExitStack() as stack:
        stack.callback(Cluster(OWN, setting="bench").close)
        alone = LocalCaptioner(command.settings, **how)
        stack.callback(lambda: asyncio.run(alone.close()))
        actor = RayCaptioner(RaySettings(address=OWN, actors=1, cpus=0.5), command.settings, **how)
        stack.callback(lambda: asyncio.run(actor.close()))
        asyncio.run(actor.start())
        sides = {
            "alone": lambda folder: caption_files(alone, args.caption_flags, folder)[0],
            "actor": lambda folder: caption_files(actor, args.caption_flags, folder)[0],
            "rows": lambda folder: _map_batches(command, folder),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(args.rounds + 1):
            print(f"round {number} of {args.rounds} ...", file=sys.stderr)
            for place, (side, run) in enumerate(sides.items()):
                shade = len(sides) * number + place
                seconds[side].append(run(draw_pictures(folder / f"{side}-{number}", args.items, shade=shade)))
    for one in seconds.values():
        del one[0]  # it warms up
    alone_s, actor_s, rows_s = seconds.values()
    about = f"{args.items} pictures; the model is loaded before"
    rates = Spread.of([args.items / one for one in alone_s])
    yield Measure(name="vlmserve caption", spread=rates, unit="pictures/s", about=about)
    yield Measure(name="one actor of --ray, of that", spread=ratios(alone_s, actor_s), target=_RATIO, about=about)
    yield Measure(name="one actor of map_batches, of that", spread=ratios(alone_s, rows_s), target=_RATIO, about=about)


class _TimedCaptioner(Captioner):
    """Captions noise before anything else, and tells when it was ready and when each batch was done."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        noise = np.random.default_rng(0).integers(0, 256, (_WARM_UP, 224, 224, 3), dtype=np.uint8)
        asyncio.run(super().__call__({"image": noise}))
        self._ready = time.time()

    async def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        answered = await super().__call__(batch)
        count = len(answered["caption"])
        return {**answered, "ready": np.full(count, self._ready), "done": np.full(count, time.time())}


def _map_batches(command: CaptionCommand, folder: Path) -> float:
    """Return the seconds in which an actor that is ready captions a folder."""
    import ray.data

    rows = [{"path": str(path)} for path in sorted(folder.iterdir())]
    engine, options = command.settings.engine, command.run.options
    answered = _TimedCaptioner.over(
        ray.data.from_items(rows), engine.model, options=options, cpus=0.5, num_threads=engine.num_threads
    )
    ready, done, count = 0.0, 0.0, 0
    for batch in answered.iter_batches(batch_size=None):
        ready, done, count = max(batch["ready"]), max(done, *batch["done"]), count + len(batch["done"])
        if any(batch["error"]):
            raise EngineError(f"not everything has a caption: {next(filter(None, batch['error']))}")
    if count != len(rows):
        raise EngineError(f"{count} captions of {len(rows)} pictures")
    return done - ready


def _memory(folder: Path, args: argparse.Namespace) -> Iterator[Measure]:
    """Measure what the process with the inputs, outputs and journal takes, beside the actor's."""
    import ray

    with ExitStack() as stack:
        stack.callback(Cluster(OWN, setting="bench").close)
        flags = [*args.caption_flags, "--ray", ray.get_runtime_context().gcs_address, "--ray-actors", "1"]
        few, many = (peak_memory(folder, count, flags) for count in args.memory_items)
    about = f"peak memory of the process that reads and writes: {' and '.join(map(str, args.memory_items))} pictures"
    yield Measure(name="the fewer pictures", spread=Spread.of([few], 1 / MIB), unit="MiB", about=about)
    yield Measure(
        name="the more pictures, of that", spread=Spread.of([many / few]), target=_FLAT, bound="at most", about=about
    )


def _serve(_: Path, args: argparse.Namespace) -> Iterator[Measure]:
    """Measure Ray Serve's app beside a server alone."""
    return serve_measures(rounds=args.rounds, requests=64, tokens=64)


_PARTS = {"captions": _captions, "memory": _memory, "serve": _serve}
