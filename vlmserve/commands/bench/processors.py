"""`vlmserve bench processors`: from files to patches, beside the reference's processors, in one run.

Ratios compare the CPU time of one thread on each side, which other work lengthens little. A clip is also timed by the
clock, with the threads that either side takes by itself, as one user waits for it.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from processors.families.base import MultimodalProcessor, ProcessorLimits, data_item
from processors.families.registry import make_processor
from processors.image.decoding import decode_image
from processors.normalize import normalize, value_width
from processors.processed import ProcessedImage, ProcessedVideo
from processors.video.options import VideoLimits
from vision.towers.runner import pixel_values
from vision.towers.temporal_patch import temporal_patches
from vlmserve.commands.bench.checkpoints import image_settings, video_settings, write_settings
from vlmserve.commands.bench.figures import bench_parser, in_turns, ratios, write_json
from vlmserve.commands.bench.media import clip, jpeg
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

_Made: TypeAlias = ProcessedImage | ProcessedVideo
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
_FPS = 2.0


def our_processor(family: str, *, threads: int) -> MultimodalProcessor:
    """Return our processor of a family. threads: that decode a clip."""
    new = family == "qwen3_vl"
    vision = {"patch_size": 16 if new else 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {"model_type": family, "vision_config": vision | {"tokens_per_second": 2}}
    limits = ProcessorLimits(video=VideoLimits(decode_threads=threads))
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        write_settings(Path(folder), family)
        return make_processor(folder, config, limits)


def picture_references(family: str, picture: bytes) -> dict[str, Callable[[], Any]]:
    """Return transformers' image processors of the family, from the bytes of a file to patches."""
    make_torchvision_importable()
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    def run(processor: Any, tensors: str) -> Any:
        image = Image.open(io.BytesIO(picture))
        return processor(images=[image], return_tensors=tensors)["pixel_values"]

    settings = image_settings(family)
    return {
        "Qwen2VLImageProcessor (torch)": partial(run, Qwen2VLImageProcessor(**settings), "pt"),
        "Qwen2VLImageProcessorPil": partial(run, Qwen2VLImageProcessorPil(**settings), "np"),
    }


def video_references(family: str, path: Path) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return the references from a file to patches, and why each other one cannot run here.

    transformers reads by torchcodec if it is installed, else by PyAV: both are measured.
    """
    make_torchvision_importable()
    import qwen_vl_utils
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.utils import logging
    from transformers.video_utils import load_video

    logging.set_verbosity_error()
    cls: Any = Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    processor = cls(**video_settings(family))
    sample = partial(processor.sample_frames, fps=_FPS, min_frames=4, max_frames=768, temporal_patch_size=2)
    read: Any = load_video

    def by_transformers(reader: str) -> Any:
        frames, metadata = read(str(path), backend=reader, sample_indices_fn=sample)
        return _patches(processor, frames, metadata)

    def by_utils() -> Any:
        factor = image_settings(family)["patch_size"]
        frames, metadata = qwen_vl_utils.fetch_video(
            {"video": str(path), "fps": _FPS}, image_patch_size=factor, return_video_metadata=True
        )
        return _patches(processor, frames.byte(), metadata, do_resize=False)

    found: dict[str, Callable[[], Any]] = {f"{cls.__name__}, PyAV": partial(by_transformers, "pyav")}
    missing: dict[str, str] = {}
    others: dict[str, Callable[[], Any]] = {
        f"{cls.__name__}, torchcodec": partial(by_transformers, "torchcodec"),
        "qwen_vl_utils": by_utils,
    }
    for name, reference in others.items():
        try:
            reference()
        except Exception as error:  # whatever its reader stumbles over
            missing[name] = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
        else:
            found[name] = reference
    return found, missing


def _patches(processor: Any, frames: Any, metadata: Any, **options: Any) -> Any:
    made = processor(videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt", **options)
    return made["pixel_values_videos"]


_ABOUT = "From picture and video files to patches, beside the processors of transformers and qwen_vl_utils."
_HD, _FULL_HD = (1280, 720), (1920, 1080)
_LEVELS = "vlmserve, 8-bit levels only"
_STEP_PATCHES = 1024  # the encoder's batch on a CPU


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for, and print a table for each."""
    parser = bench_parser("processors", _ABOUT, rounds=5, parts=PARTS)
    add = parser.add_argument
    add("--family", choices=FAMILIES, default=FAMILIES[0], help="model family whose published settings are used")
    add("--seconds", type=int, default=60, metavar="N", help="length of the clip, a multiple of 10")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    write_json(args, {part: PARTS[part](args) for part in args.parts})
    return 0


def measure_picture(args: argparse.Namespace) -> dict[str, Any]:
    """Time a 1080p JPEG to patches."""
    data, processor = jpeg(*_FULL_HD, seed=0), our_processor(args.family, threads=1)
    ours = partial(_picture, processor, data)
    references = picture_references(args.family, data)
    _check_equal(_values(ours()), next(iter(references.values()))())
    print(f"\n1920x1080 JPEG ({len(data) // 1024} KiB) to patches, {args.family}, one thread")
    return _compare(ours, references, args.rounds)


def measure_wait(args: argparse.Namespace) -> dict[str, Any]:
    """Time the clip by the clock, with all cores for each side."""
    torch.set_num_threads(available_cpus())
    try:
        return measure_clip(args, decode_threads=VideoLimits().decode_threads, by_the_clock=True)
    finally:
        torch.set_num_threads(1)


def measure_clip(args: argparse.Namespace, *, decode_threads: int = 1, by_the_clock: bool = False) -> dict[str, Any]:
    """Time a 720p clip at 2 frames a second to patches: decoding, sampling, resizing, cutting."""
    print(f"\nencoding a clip of {args.seconds} s ...", file=sys.stderr)
    data = clip(*_HD, seconds=args.seconds, rate=30)
    processor = our_processor(args.family, threads=decode_threads)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        path = Path(folder) / "clip.mp4"
        path.write_bytes(data)

        def ours() -> ProcessedVideo:
            return processor.process_video(path.read_bytes())

        references, missing = video_references(args.family, path)
        _check_equal(_values(ours()), next(iter(references.values()))())
        how = "threads as they are by default" if by_the_clock else "one thread"
        print(f"\n{args.seconds} s of 1280x720 at 30 frames/s, 2 used, to patches, {args.family}, {how}")
        for name, why in missing.items():
            print(f"{name} cannot run here: {why}")
        return _compare(ours, references, args.rounds, by_the_clock=by_the_clock)


def _compare(
    ours: Callable[[], _Made],
    references: dict[str, Callable[[], Any]],
    rounds: int,
    *,
    by_the_clock: bool = False,
) -> dict[str, dict[str, Any]]:
    """Print and return the times of all sides; ratios compare CPU time, or the clock."""
    timings = in_turns({"vlmserve": _with_values(ours), _LEVELS: ours, **references}, rounds)
    measure = "wall" if by_the_clock else "cpu"
    title = "by the clock" if by_the_clock else "CPU time"
    print(f"{'':32}{'CPU ms':>10}{'clock ms':>10}   {title}, times ours (rounds)")
    for name, timing in timings.items():
        cpu, wall = statistics.median(timing.cpu), statistics.median(timing.wall)
        beside = "" if name == "vlmserve" else ratios(getattr(timing, measure), getattr(timings["vlmserve"], measure))
        print(f"{name:32}{cpu * 1e3:10.1f}{wall * 1e3:10.1f}   {beside}")
    return {name: asdict(timing) for name, timing in timings.items()}


def _values(made: _Made) -> np.ndarray:
    return pixel_values(temporal_patches(data_item(made)), torch.device("cpu")).numpy()


def _check_equal(ours: np.ndarray, theirs: Any) -> None:
    """Raise AssertionError unless both sides made the same patches: only equal work may be compared in speed."""
    other = np.asarray(theirs)
    off = float(np.abs(ours - other).max()) if ours.shape == other.shape else float("inf")
    print(f"largest difference of a patch value: {off:.2g}")
    if not off < 0.02:
        raise AssertionError(f"patches differ: {ours.shape} and {other.shape}, by {off}")


def _picture(processor: MultimodalProcessor, data: bytes) -> ProcessedImage:
    return processor.process_image(decode_image(data, processor.limits.decode))


def _with_values(make: Callable[[], _Made]) -> Callable[[], None]:
    """Return a call that makes patches and, as the reference does, their values; our encoder makes these in batches."""

    def run() -> None:
        made = make()
        assert made.normalization is not None
        step = torch.empty(_STEP_PATCHES, value_width(made.feature, made.normalization), dtype=torch.float32)
        for start in range(0, len(made.feature), _STEP_PATCHES):
            levels = made.feature[start : start + _STEP_PATCHES]
            normalize(levels, made.normalization, step[: len(levels)])

    return run


PARTS = {
    "picture": measure_picture,
    "clip": measure_clip,
    "wait": measure_wait,
}
