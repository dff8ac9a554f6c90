"""Small processors and pictures for the tests of floor 1."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from processors.families.base import MultimodalProcessor, ProcessedMedium, ProcessorLimits
from processors.families.registry import make_processor
from processors.inputs import MultimodalDataItem
from processors.normalize import normalize
from processors.processed import ProcessedImage

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = 93, 94, 91, 92


def values(medium: ProcessedMedium | MultimodalDataItem) -> np.ndarray:
    """A medium's patches as towers take them."""
    assert medium.feature.dtype == np.uint8
    assert medium.normalization is not None
    return normalize(medium.feature, medium.normalization).numpy()


def hf_config(family: str) -> dict:
    vision = {"patch_size": 16 if family == "qwen3_vl" else 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_5_vl":
        vision["tokens_per_second"] = 2
    return {
        "model_type": family,
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "vision_config": vision,
    }


def preprocessor_config(family: str, min_pixels: int = 3136, max_pixels: int = 50176) -> dict:
    common = {
        "temporal_patch_size": 2,
        "merge_size": 2,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    if family == "qwen3_vl":
        size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        return {**common, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": size}
    clip = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return {**common, **clip, "patch_size": 14, "min_pixels": min_pixels, "max_pixels": max_pixels}


def write_checkpoint(folder: Path, family: str, **budget: int) -> Path:
    (folder / "config.json").write_text(json.dumps(hf_config(family)))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(family, **budget)))
    return folder


def tiny_processor(
    folder: Path, family: str = "qwen3_vl", limits: ProcessorLimits | None = None, **budget: int
) -> MultimodalProcessor:
    return make_processor(write_checkpoint(folder, family, **budget), hf_config(family), limits)


def noise(width: int, height: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """uint8 [height, width, channels]: smooth shapes and noise, so that resampling has something to get wrong."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (3 + c)) + np.cos(y / (5 + c)) for c in range(channels)]
    smooth = np.stack(waves, -1) * 60 + 128
    return np.clip(smooth + rng.normal(0, 25, smooth.shape), 0, 255).astype(np.uint8)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(width, height, seed))


def processed(digest: bytes, feature: np.ndarray) -> ProcessedImage:
    """A picture of one token, known by its digest."""
    return ProcessedImage(
        digest=digest,
        patch_digests=(digest,),
        grid_thw=(1, 2, 2),
        feature=feature,
        num_tokens=1,
        source_size=(1, 1),
    )


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


_MEASURE = """
import re, sys
from pathlib import Path
from processors.image.decoding import DecodeLimits, decode_image
from processors.video.decoding import Clip
from processors.video.options import VideoLimits
from vlmserve_common.errors import BadRequestError
data, is_video = Path(sys.argv[1]).read_bytes(), sys.argv[2] == "video"
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before = peak()
try:
    if is_video:
        clip = Clip(data, VideoLimits())
        count = sum(1 for _ in clip.read(range(clip.info.num_frames)))
    else:
        count = len([decode_image(data, DecodeLimits())])
except BadRequestError:
    count = 0
print(count, peak() - before)
"""


def decoded_and_growth(data: bytes, kind: str, folder: Path) -> tuple[int, int]:
    """Pictures or frames read of a file, and the growth of the peak, in MiB, of a process of its own."""
    (folder / "file").write_bytes(data)
    words = [sys.executable, "-c", _MEASURE, str(folder / "file"), kind]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    count, grown = map(int, done.stdout.split())
    return count, grown
