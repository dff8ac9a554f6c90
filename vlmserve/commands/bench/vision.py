"""`vlmserve bench vision`: the vision encoder beside transformers', and what its caches save.

Each figure is a ratio of alternatives that took turns in one run, with its target beside it.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch

from processors.families.base import MultimodalProcessor, ProcessorLimits, data_item
from processors.families.registry import make_processor
from processors.image.decoding import decode_image
from processors.video.options import VideoKnobs, VideoLimits, VideoOptions
from vision.cache.disk_tier import DiskTier
from vision.cache.store import EmbeddingStore
from vision.encoder_pool import EncoderPool, PoolLimits
from vision.towers.blocks import VisionTower
from vision.towers.grids import Grid
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner, pixel_values
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vision.workers.inline import InlineBackend
from vlmserve.commands.bench.checkpoints import VISION_SIZES, write_random_checkpoint, write_settings
from vlmserve.commands.bench.figures import Measure, TurnTimes, bench_parser, in_turns, ratios, show_and_write
from vlmserve.commands.bench.media import clip, jpeg
from vlmserve.commands.bench.reference import ReferenceTower, check_rows, load_reference
from vlmserve.engine.encoder import embed_shape, make_cache
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.library import activate

PLENTY = 1 << 40
"""A limit in bytes that is never met."""
_FINGERPRINT = bytes(32)
# The decoder is as wide as the rows and otherwise tiny: it is stored with the tower and not used.
_TEXT_SIZES = {"num_hidden_layers": 3, "hidden_size": 2048, "intermediate_size": 256}


def write_checkpoint(folder: Path, *, depth: int) -> Path:
    """Write a tower of `depth` layers like Qwen3-VL-2B's (which has 24) with random weights, and published settings."""
    sizes = VISION_SIZES | {
        "depth": depth,
        "out_hidden_size": _TEXT_SIZES["hidden_size"],
        "deepstack_visual_indexes": sorted({max(0, depth * part // 4 - 1) for part in (1, 2, 3)}),
    }
    write_random_checkpoint(folder, text_sizes=_TEXT_SIZES, vision_sizes=sizes)
    write_settings(folder, "qwen3_vl")
    return folder


def use_threads(device: torch.device, threads: int) -> str:
    """Let this process compute with `threads` threads; return what computes, for people."""
    torch.set_num_threads(threads)
    return activate("auto", threads=threads) if device.type == "cpu" else fused.activate("auto", device)


class TowerSubject:
    """The tower of a checkpoint folder in `dtype` on `device`, and its processor."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype
        self.tower: VisionTower = load_tower(folder, device=device, dtype=dtype)
        pack_linears(self.tower)
        self.runner = TowerRunner(self.tower, device)
        limits = ProcessorLimits(
            video=VideoLimits(decode_threads=1), video_options=VideoOptions(sampling="time-grid", fps=2.0)
        )
        self.processor: MultimodalProcessor = make_processor(folder, read_hf_config(folder), limits)

    def picture(self, width: int, height: int, *, seed: int = 0) -> tuple[TemporalPatch, ...]:
        """Return a JPEG file, processed."""
        image = decode_image(jpeg(width, height, seed), self.processor.limits.decode)
        return temporal_patches(data_item(self.processor.process_image(image)))

    def clip(self, data: bytes, knobs: VideoKnobs) -> tuple[TemporalPatch, ...]:
        """Return a part of a video file on the time grid at two frames a second, processed."""
        return temporal_patches(data_item(self.processor.process_video(data, knobs)))

    def pool(
        self, *, device_bytes: int, host_bytes: int = 0, max_patches: int, disk: DiskTier | None = None
    ) -> closing[EncoderPool]:
        """Return an encoder pool that its context closes.

        `device_bytes` and `host_bytes` are room for rows that are not in use. A batch has `max_patches` at the most.
        """
        return closing(
            EncoderPool(
                InlineBackend(self.runner),
                make_cache(self.device, device_bytes=device_bytes, host_bytes=host_bytes),
                fingerprint=_FINGERPRINT,
                embed_shape=embed_shape(self.tower, self.dtype),
                limits=PoolLimits(max_patches=max_patches, space_bytes=PLENTY),
                disk=disk,
            )
        )


def grid_thw(medium: Sequence[TemporalPatch]) -> Grid:
    """Return the patches of a medium in time, height and width."""
    return len(medium), *medium[0].grid


def finish(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_rows(pool: EncoderPool, patches: Sequence[TemporalPatch]) -> list[torch.Tensor]:
    """Return the rows of temporal patches as a request gets them: held, waited for, taken and released."""
    keys = pool.submit(patches, order=0)
    while not all(map(pool.is_ready, keys)):
        _advance(pool)
        failures = pool.take_failures()
        if failures:
            raise RuntimeError(f"not encoded: {', '.join(failures.values())}")
    rows = [pool.embeds(key) for key in keys]
    pool.release(keys, order=0)
    return rows


def settle(pool: EncoderPool) -> None:
    """Wait until the pool is idle, so that all rows are on the disk."""
    while pool.busy:
        _advance(pool)


def _advance(pool: EncoderPool) -> None:
    if not pool.advance() and not pool.work(math.inf):
        wait(pool.wait_handles())


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
