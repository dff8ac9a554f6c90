"""The processors of a family without a checkpoint: ours, transformers' and qwen_vl_utils', with published settings."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from processors.families.base import MultimodalProcessor, ProcessorLimits
from processors.families.registry import make_processor
from processors.video.options import VideoLimits
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
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


def write_settings(folder: Path, family: str) -> None:
    """Write a family's settings of pictures and videos into a checkpoint folder."""
    for name, settings in (("preprocessor", image_settings), ("video_preprocessor", video_settings)):
        (folder / f"{name}_config.json").write_text(json.dumps(settings(family)))


def image_settings(family: str) -> dict[str, Any]:
    """Return preprocessor_config.json as published."""
    if family == "qwen3_vl":
        size = {"shortest_edge": 65536, "longest_edge": 16777216}
        return {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": size, **_HALF}
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    return {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "size": size, **_CLIP}


def video_settings(family: str) -> dict[str, Any]:
    """Return video_preprocessor_config.json as published; for older families, the defaults of transformers."""
    if family == "qwen3_vl":
        return image_settings(family) | {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    return image_settings(family) | {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}}


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
