"""What `vlmserve bench vision` measures, one function a part. All ratios are of alternatives that took turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
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
from vision.towers.temporal_patch import TemporalPatch
from vision.workers.backend import EncoderBackend
from vision.workers.settings import WorkerSettings
from vlmserve.commands.bench.interleaved import Spread, Timing, ratios
from vlmserve.commands.bench.measure import Measure
from vlmserve.commands.bench.media import clip
from vlmserve.commands.bench.reference import ReferenceTower, check_rows, load_reference
from vlmserve.commands.bench.vision_subject import (
    PLENTY,
    Subject,
    finish,
    grid_thw,
    settle,
    take_rows,
    turns_on,
    use_threads,
)
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base
from vlmserve_common.compute.tensors import dtype_name

# (width, height) of pictures: square, wide, tall, and one in between
_PICTURES = ((256, 256), (640, 192), (160, 512), (448, 352))
_CLIP = (256, 160)
# of a clip only the first tenth is all different
_SECONDS, _RATE = 20, 10
_LARGE = (1024, 1024)
_LOOKUPS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """rounds: in which alternatives take turns. threads: of torch, on a CPU. max_patches: in a batch of the pool."""

    rounds: int
    threads: int
    max_patches: int


def measure_cold(subject: Subject, plan: Plan) -> list[Measure]:
    """Encoding a batch of mixed sizes, beside transformers: packed as it is meant to be, and one medium at a time,
    which on a CPU is quicker."""
    media = [subject.picture(*size, seed=seed) for seed, size in enumerate(_PICTURES)]
    media.append(subject.clip(clip(*_CLIP, seconds=10 * _SECONDS, rate=_RATE), VideoKnobs(video_end=3.5)))
    patches = [patch for medium in media for patch in medium]
    pixels = [pixel_values(medium, torch.device("cpu")) for medium in media]
    packed, grids = torch.cat(pixels), [grid_thw(medium) for medium in media]
    model = load_reference(subject.folder, dtype=subject.dtype)
    reference = ReferenceTower(model, device=subject.device, dtype=subject.dtype)
    del model  # its decoder is not needed
    off = check_rows(torch.cat(subject.runner.encode(patches)), reference.encode(packed, grids))
    found = turns_on(
        subject.device,
        plan.rounds,
        {
            "vlmserve": lambda: torch.cat(subject.runner.encode(patches)),
            "packed": lambda: reference.encode(packed, grids),
            "one by one": lambda: [reference.encode(part, [grid]) for part, grid in zip(pixels, grids, strict=True)],
        },
    )
    seconds = {name: _computing(subject, timing) for name, timing in found.items()}
    rates = ", ".join(f"{name} {len(packed) / float(np.median(each)):.0f}" for name, each in seconds.items())
    about = f"{len(packed)} patches, grids {grids}; patches/s: {rates}; rows are within {off:.2g} of each other"
    return [
        Measure(
            name=f"time of transformers' tower, {name}, beside ours",
            spread=ratios(seconds[name], seconds["vlmserve"]),
            target=1.2,
            about=about,
            timings=found,
        )
        for name in ("packed", "one by one")
    ]


def measure_hits(subject: Subject, plan: Plan) -> list[Measure]:
    """A picture whose rows are known: in memory (on a GPU: the host's), on the disk, and not at all."""
    picture = subject.picture(*_LARGE, seed=100)
    about = f"grid {grid_thw(picture)}; hits by the clock; the file is in the page cache"
    on_cpu = subject.device.type == "cpu"
    with ExitStack() as stack:
        pool = partial(subject.pool, max_patches=plan.max_patches)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmserve-bench-"))
        cold = stack.enter_context(pool(device_bytes=0))
        memory = stack.enter_context(pool(device_bytes=PLENTY if on_cpu else 0, host_bytes=PLENTY))
        store = EmbeddingStore(Path(folder), fingerprint=bytes(32), limit_bytes=PLENTY, about={})
        disk = stack.enter_context(pool(device_bytes=0, disk=DiskTier(store)))
        pools = {"encode": cold, "memory": memory, "disk": disk}
        for each in (memory, disk):
            take_rows(each, picture)
            settle(each)

        take = {name: partial(take_rows, each, picture) for name, each in pools.items()}
        found = turns_on(subject.device, plan.rounds, take)
        if memory.stats().encoded != 1 or disk.stats().encoded != 1:
            raise AssertionError("rows that were to be found were encoded again")
        wrong = [name for name in ("memory", "disk") if not torch.equal(take[name]()[0], take["encode"]()[0])]
        if wrong:
            raise AssertionError(f"rows from {', '.join(wrong)} are not those that were encoded")
    cold_s = _computing(subject, found["encode"])
    return [
        Measure(
            name=f"time of encoding a {_LARGE[0]}x{_LARGE[1]} picture, beside a hit in {name}",
            spread=ratios(cold_s, found[name].wall),
            target=target,
            about=about,
            timings=found,
        )
        for name, target in (("memory", 50.0), ("disk", 10.0))
    ]


def measure_clips(subject: Subject, plan: Plan) -> list[Measure]:
    """Two clips of one file on the time grid, with three quarters of their frames in common."""
    data = clip(*_CLIP, seconds=10 * _SECONDS, rate=_RATE)
    first = subject.clip(data, VideoKnobs(video_start=0.0, video_end=15.75))
    second = subject.clip(data, VideoKnobs(video_start=4.0, video_end=19.75))
    common = len({patch.digest for patch in first} & {patch.digest for patch in second})
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    clock = time.process_time if subject.device.type == "cpu" else time.perf_counter
    # not `in_turns`: the second is only worth something after the first, in a cache that was empty
    for _ in range(plan.rounds):
        with subject.pool(device_bytes=PLENTY, max_patches=plan.max_patches) as pool:
            for name, medium in (("first", first), ("second", second)):
                started = clock()
                take_rows(pool, medium)
                finish(subject.device)
                seconds[name].append(clock() - started)
            encoded = pool.stats().encoded
    reused = len(first) + len(second) - encoded
    if reused != common:
        raise AssertionError(f"{common} temporal patches are in common, but {reused} were found")
    about = (
        f"grids {grid_thw(first)} and {grid_thw(second)}: {common} of {len(second)} temporal patches in common "
        "and found"
    )
    name = "time of the second of two clips with 75% in common, beside the first"
    spread = ratios(seconds["second"], seconds["first"])
    return [Measure(name=name, spread=spread, target=1 / 3, bound="at most", about=about)]


def measure_lookup(subject: Subject, plan: Plan) -> list[Measure]:
    """From a temporal patch to its rows, when they are on the device."""
    rng, pixels = np.random.default_rng(0), np.empty((0, 0), np.float32)
    patches = [TemporalPatch(digest=rng.bytes(32), grid=(2, 2), pixels=pixels) for _ in range(_LOOKUPS)]
    times: list[np.ndarray] = []
    with subject.pool(device_bytes=PLENTY, max_patches=plan.max_patches) as pool:
        rows = torch.zeros(1, 8, device=subject.device)
        for patch in patches:
            pool.cache.add(pool.key(patch), rows.clone())
        for _ in range(plan.rounds):
            each = []
            for patch in patches:
                started = time.perf_counter_ns()
                key = pool.key(patch)
                found = pool.cache.embeds(key) if pool.cache.find(key) else None
                each.append((time.perf_counter_ns() - started) / 1e3)
                assert found is not None
            times.append(np.array(each))
    return [
        Measure(
            name=f"one look-up in the embedding cache, p{percent}",
            spread=Spread.of([float(np.percentile(each, percent)) for each in times]),
            unit="us",
            target=50.0,
            bound="at most",
            about=f"{_LOOKUPS} keys",
        )
        for percent in (50, 99)
    ]


def measure_workers(subject: Subject, plan: Plan) -> list[Measure]:
    """Two encoder processes of one thread each, beside one, and beside two threads in this process; by the clock."""
    from vision.workers.process_backend import ProcessBackend  # needs msgspec

    patches = [subject.picture(*size, seed=200 + seed)[0] for seed, size in enumerate(_PICTURES * 2)]
    with ExitStack() as stack:

        def processes(count: int) -> EncoderBackend:
            folder = stack.enter_context(PrivateDirectory(shared_memory_base(), "vlmserve-bench")).path
            backend = ProcessBackend(
                WorkerSettings(
                    model=subject.folder,
                    devices=(str(subject.device),) * count,
                    shared_dir=folder,
                    rows_device=str(subject.device),
                    dtype=dtype_name(subject.dtype),
                )
            )
            stack.callback(backend.close)
            backend.wait_ready()
            return backend

        pool = partial(subject.pool, device_bytes=0, max_patches=plan.max_patches)
        pools = {
            "one process": stack.enter_context(pool(backend=processes(1))),
            "two processes": stack.enter_context(pool(backend=processes(2))),
            "two threads": stack.enter_context(pool()),
        }

        def take(name: str) -> None:
            use_threads(subject.device, 2)
            try:
                take_rows(pools[name], patches)
            finally:
                use_threads(subject.device, plan.threads)

        found = turns_on(subject.device, plan.rounds, {name: partial(take, name) for name in pools})
    about = f"{len(patches)} pictures, {sum(patch.num_patches for patch in patches)} patches, by the clock"
    return [
        Measure(
            name=f"time of {name}, beside two processes",
            spread=ratios(found[name].wall, found["two processes"].wall),
            about=about,
            timings=found,
        )
        for name in ("one process", "two threads")
    ]


def _computing(subject: Subject, timing: Timing) -> tuple[float, ...]:
    """Seconds of work of one process: on a CPU its own, whoever else wants the cores."""
    return timing.cpu if subject.device.type == "cpu" else timing.wall


PARTS: dict[str, Callable[[Subject, Plan], list[Measure]]] = {
    "cold": measure_cold,
    "hits": measure_hits,
    "clips": measure_clips,
    "lookup": measure_lookup,
    "workers": measure_workers,
}
