"""What a checkpoint folder says about its pictures: preprocessor_config.json and the token ids of config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processors.resize import RESAMPLING, PatchConfig
from vlmserve.common.errors import CheckpointError

# What transformers' Qwen2VLImageProcessor takes where a checkpoint is silent (mean and deviation are CLIP's).
_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "resample": 3,
}
_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280

# The ids of the published Qwen2-VL, Qwen2.5-VL and Qwen3-VL vocabularies.
_DEFAULT_IDS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """Vocabulary ids of the tokens that stand for media in a prompt."""

    image_pad: int
    video_pad: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorConfig:
    """A checkpoint's own preprocessing. min_pixels, max_pixels: area of a resized picture.

    tokens_per_second: M-RoPE time positions in a second of video (Qwen2.5-VL), None where time counts patches.
    """

    patches: PatchConfig
    min_pixels: int
    max_pixels: int
    token_ids: TokenIds
    tokens_per_second: float | None


def read_processor_config(model_path: str | Path, hf_config: Mapping[str, Any]) -> ProcessorConfig:
    """Read a checkpoint folder's picture settings. Raises CheckpointError when they are missing or unusable.

    hf_config: the content of config.json. The settings are looked for where transformers does: under "image_processor"
    in processor_config.json, else in preprocessor_config.json.
    """
    folder = Path(model_path)
    source, raw = _read_settings(folder)
    try:
        return _parse(raw, hf_config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: unusable picture settings: {error}") from error


def _read_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    nested = _read_json(folder / "processor_config.json").get("image_processor")
    if nested is not None:
        return folder / "processor_config.json", nested
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no preprocessor_config.json, which says how pictures are prepared")
    return path, _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _parse(raw: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ProcessorConfig:
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if not raw.get(step, True):
            raise ValueError(f"{step} false is not supported")
    values = {key: default if raw.get(key) is None else raw[key] for key, default in _DEFAULTS.items()}
    if values["resample"] not in RESAMPLING:
        raise ValueError(f"resample {values['resample']!r}, supported are {sorted(RESAMPLING)}")
    patches = PatchConfig(
        patch_size=int(values["patch_size"]),
        merge_size=int(values["merge_size"]),
        temporal_patch_size=int(values["temporal_patch_size"]),
        mean=tuple(float(x) for x in values["image_mean"]),
        std=tuple(float(x) for x in values["image_std"]),
        rescale_factor=float(values["rescale_factor"]),
        resample=RESAMPLING[values["resample"]],
    )
    if len(patches.mean) != 3 or len(patches.std) != 3 or 0.0 in patches.std:
        raise ValueError(f"image_mean {patches.mean} and image_std {patches.std} need three values, none of std zero")
    vision = hf_config.get("vision_config") or {}
    _check_same("patch_size", patches.patch_size, vision.get("patch_size"))
    _check_same("merge_size", patches.merge_size, vision.get("spatial_merge_size"))
    _check_same("temporal_patch_size", patches.temporal_patch_size, vision.get("temporal_patch_size"))

    min_pixels, max_pixels = _budget(raw)
    if not 0 < min_pixels <= max_pixels:
        raise ValueError(f"min_pixels {min_pixels} and max_pixels {max_pixels} are no range")
    ids = {key: int(hf_config.get(key, default)) for key, default in _DEFAULT_IDS.items()}
    tokens_per_second = vision.get("tokens_per_second")
    return ProcessorConfig(
        patches=patches,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        token_ids=TokenIds(
            image_pad=ids["image_token_id"],
            video_pad=ids["video_token_id"],
            vision_start=ids["vision_start_token_id"],
            vision_end=ids["vision_end_token_id"],
        ),
        tokens_per_second=None if tokens_per_second is None else float(tokens_per_second),
    )


def _budget(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Area limits in any of the spellings found in checkpoints; min_pixels and max_pixels win over `size`."""
    size = raw.get("size") or {}

    def pick(own: str, in_size: str, default: int) -> int:
        candidates = (raw.get(own), size.get(in_size), size.get(own), default)
        return int(next(value for value in candidates if value is not None))

    return (
        pick("min_pixels", "shortest_edge", _DEFAULT_MIN_PIXELS),
        pick("max_pixels", "longest_edge", _DEFAULT_MAX_PIXELS),
    )


def _check_same(name: str, ours: int, towers: int | None) -> None:
    if towers is not None and int(towers) != ours:
        raise ValueError(f"{name} is {ours} here but {towers} in config.json's vision_config")
