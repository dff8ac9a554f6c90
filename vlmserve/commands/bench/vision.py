"""`vlmserve bench vision`: the vision encoder beside transformers', and what its caches save.

Each figure is a ratio of alternatives that took turns in one run, with its target beside it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from processors.video.options import VideoKnobs
from vision.cache.disk_tier import DiskTier
from vision.cache.store import EmbeddingStore
from vision.towers.runner import pixel_values
from vlmserve.commands.bench.figures import Measure, TurnTimes, bench_parser, in_turns, ratios, show_and_write
from vlmserve.commands.bench.media import clip
from vlmserve.commands.bench.reference import ReferenceTower, check_rows, load_reference
from vlmserve.commands.bench.vision_subject import (
    PLENTY,
    TowerSubject,
    finish,
    grid_thw,
    settle,
    take_rows,
    use_threads,
    write_checkpoint,
)
from vlmserve_common.compute.cpus import available_cpus

_ABOUT = """\
Pictures and clips to embeddings: beside transformers' vision tower; found in memory and on the disk; clips that
overlap.
"""
_DEPTH = 24  # layers of Qwen3-VL-2B's tower
# (width, height) of pictures: square, wide, tall, and one in between
_PICTURES = ((256, 256), (640, 192), (160, 512), (448, 352))
_CLIP = (256, 160)
_SECONDS, _RATE = 20, 10  # of the clip's first tenth, which alone is all different
_LARGE = (1024, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerRun:
    """A measurement of a tower. rounds: in which alternatives take turns. max_patches: in a batch of the pool."""

    subject: TowerSubject
    rounds: int
    max_patches: int

    def turns(self, alternatives: Mapping[str, Callable[[], object]]) -> dict[str, TurnTimes]:
        """Time the alternatives in turns, each until the device is done."""

        def finished(run: Callable[[], object]) -> None:
            run()
            finish(self.subject.device)

        return in_turns({name: partial(finished, run) for name, run in alternatives.items()}, self.rounds)

    def computing(self, times: TurnTimes) -> tuple[float, ...]:
        """Return the seconds of work: on a CPU, the CPU time of this process."""
        return times.cpu if self.subject.device.type == "cpu" else times.wall


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for, and print a line for each figure."""
    parser = bench_parser("vision", _ABOUT, rounds=5, parts=PARTS)
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint folder; random weights with a tower like Qwen3-VL-2B's if left out")
    add("--depth", type=int, default=_DEPTH, help="layers of the random tower")
    add("--device", default="cpu", help="where the tower computes: cpu, cuda, cuda:1 ...")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="in which type it computes")
    add("--threads", type=int, default=available_cpus(), help="CPU threads of each side")
    add("--encoder-max-patches", type=int, default=1024, help="patches in a batch of the encoder pool")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    computes = use_threads(device, args.threads)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        model, what = args.model, str(args.model)
        if model is None:
            what = f"random weights in the shape of Qwen3-VL-2B's tower, {args.depth} of its {_DEPTH} layers"
            print(f"writing {what} ...", file=sys.stderr)
            model = write_checkpoint(Path(folder), depth=args.depth)
        subject = TowerSubject(model, device=device, dtype=getattr(torch, args.dtype))
        run = TowerRun(subject=subject, rounds=args.rounds, max_patches=args.encoder_max_patches)
        print(f"{what}; {args.dtype} on {args.device}, threads: {args.threads}, rounds: {args.rounds}; {computes}")
        show_and_write(args, {part: PARTS[part](run) for part in args.parts}, checkpoint=what)
    return 0


def measure_cold(run: TowerRun) -> Iterator[Measure]:
    """Encode a batch of mixed sizes beside transformers: packed, and one medium at a time, which a CPU does quicker."""
    subject = run.subject
    media = [subject.picture(*size, seed=seed) for seed, size in enumerate(_PICTURES)]
    media.append(subject.clip(clip(*_CLIP, seconds=10 * _SECONDS, rate=_RATE), VideoKnobs(video_end=3.5)))
    patches = [patch for medium in media for patch in medium]
    pixels = [pixel_values(medium, torch.device("cpu")) for medium in media]
    packed, grids = torch.cat(pixels), [grid_thw(medium) for medium in media]
    model = load_reference(subject.folder, dtype=subject.dtype)
    reference = ReferenceTower(model, device=subject.device, dtype=subject.dtype)
    del model  # its decoder is not needed
    off = check_rows(torch.cat(subject.runner.encode(patches)), reference.encode(packed, grids))
    found = run.turns(
        {
            "vlmserve": lambda: torch.cat(subject.runner.encode(patches)),
            "packed": lambda: reference.encode(packed, grids),
            "one by one": lambda: [reference.encode(part, [grid]) for part, grid in zip(pixels, grids, strict=True)],
        }
    )
    seconds = {name: run.computing(times) for name, times in found.items()}
    rates = ", ".join(f"{name} {len(packed) / float(np.median(each)):.0f}" for name, each in seconds.items())
    about = f"{len(packed)} patches, grids {grids}; patches/s: {rates}; rows are within {off:.2g} of each other"
    for name in ("packed", "one by one"):
        yield Measure(
            name=f"time of transformers' tower, {name}, beside ours",
            spread=ratios(seconds[name], seconds["vlmserve"]),
            target=1.2,
            about=about,
            timings=found,
        )


def measure_hits(run: TowerRun) -> Iterator[Measure]:
    """Ask for a picture whose rows are in memory (on a GPU: the host's), on the disk, and nowhere."""
    subject = run.subject
    picture = subject.picture(*_LARGE, seed=100)
    on_cpu = subject.device.type == "cpu"
    with ExitStack() as stack:
        pool = partial(subject.pool, max_patches=run.max_patches)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmserve-bench-"))
        store = EmbeddingStore(Path(folder), fingerprint=bytes(32), limit_bytes=PLENTY, about={})
        pools = {
            "encode": stack.enter_context(pool(device_bytes=0)),
            "memory": stack.enter_context(pool(device_bytes=PLENTY if on_cpu else 0, host_bytes=PLENTY)),
            "disk": stack.enter_context(pool(device_bytes=0, disk=DiskTier(store))),
        }
        for each in (pools["memory"], pools["disk"]):
            take_rows(each, picture)
            settle(each)
        take = {name: partial(take_rows, each, picture) for name, each in pools.items()}
        found = run.turns(take)
        if any(pools[name].stats().encoded != 1 for name in ("memory", "disk")):
            raise AssertionError("rows that were to be found were encoded again")
        wrong = [name for name in ("memory", "disk") if not torch.equal(take[name]()[0], take["encode"]()[0])]
        if wrong:
            raise AssertionError(f"rows from {', '.join(wrong)} are not those that were encoded")
    for name, target in (("memory", 50.0), ("disk", 10.0)):
        yield Measure(
            name=f"time of encoding a {_LARGE[0]}x{_LARGE[1]} picture, beside a hit in {name}",
            spread=ratios(run.computing(found["encode"]), found[name].wall),
            target=target,
            about=f"grid {grid_thw(picture)}; hits by the clock; the file is in the page cache",
            timings=found,
        )


def measure_clips(run: TowerRun) -> Iterator[Measure]:
    """Encode two clips of one file on the time grid that have three quarters of their frames in common."""
    subject = run.subject
    data = clip(*_CLIP, seconds=10 * _SECONDS, rate=_RATE)
    first = subject.clip(data, VideoKnobs(video_start=0.0, video_end=15.75))
    second = subject.clip(data, VideoKnobs(video_start=4.0, video_end=19.75))
    common = len({patch.digest for patch in first} & {patch.digest for patch in second})
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    clock = time.process_time if subject.device.type == "cpu" else time.perf_counter
    # not `in_turns`: the second is only worth something after the first, in a cache that was empty
    for _ in range(run.rounds):
        with subject.pool(device_bytes=PLENTY, max_patches=run.max_patches) as pool:
            for name, medium in (("first", first), ("second", second)):
                started = clock()
                take_rows(pool, medium)
                finish(subject.device)
                seconds[name].append(clock() - started)
            encoded = pool.stats().encoded
    reused = len(first) + len(second) - encoded
    if reused != common:
        raise AssertionError(f"{common} temporal patches are in common, but {reused} were found")
    grids = f"grids {grid_thw(first)} and {grid_thw(second)}"
    yield Measure(
        name="time of the second of two clips with 75% in common, beside the first",
        spread=ratios(seconds["second"], seconds["first"]),
        target=1 / 3,
        bound="at most",
        about=f"{grids}: {common} of {len(second)} temporal patches in common and found",
    )


PARTS: dict[str, Callable[[TowerRun], Iterator[Measure]]] = {
    "cold": measure_cold,
    "hits": measure_hits,
    "clips": measure_clips,
}
