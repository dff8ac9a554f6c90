"""Reads a checkpoint folder's settings for media: (video_)preprocessor_config.json and token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processors.audio.options import AudioConfig, read_audio_config
from processors.embeds import EmbedsShape
from processors.resize import RESAMPLING, PatchConfig
from processors.video.options import VideoConfig
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.hf_config import has_tower
from vlmserve_common.errors import CheckpointError

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

_SMALLEST = ("min_pixels", "shortest_edge")
_LARGEST = ("max_pixels", "longest_edge")

# Names in config.json, and the ids of the published Qwen2-VL, Qwen2.5-VL and Qwen3-VL vocabularies.
_IDS = {
    "vision_start": ("vision_start_token_id", 151652),
    "vision_end": ("vision_end_token_id", 151653),
    "image_pad": ("image_token_id", 151655),
    "video_pad": ("video_token_id", 151656),
}
_AUDIO_IDS = {"audio_pad": "audio_token_id", "audio_start": "audio_start_token_id", "audio_end": "audio_end_token_id"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """Vocabulary ids of the tokens that stand for media in a prompt. Those of sounds are -1 for a model without
    ears."""

    image_pad: int
    video_pad: int
    vision_start: int
    vision_end: int
    audio_pad: int = -1
    audio_start: int = -1
    audio_end: int = -1

    @property
    def pads(self) -> tuple[int, ...]:
        """The placeholders of pictures, videos and, if the model hears, sounds."""
        return tuple(pad for pad in (self.image_pad, self.video_pad, self.audio_pad) if pad >= 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorConfig:
    """A checkpoint's own preprocessing.

    `min_pixels`, `max_pixels`: limits of a resized picture's area. `tokens_per_second`: M-RoPE time positions in a
    second of video (Qwen2.5-VL). None where time counts patches. `video`, `video_patches`: the settings for videos.
    `embeds`: row sizes of the vision tower; None where config.json does not give them. `audio`: None for a model
    without ears.
    """

    patches: PatchConfig
    min_pixels: int
    max_pixels: int
    token_ids: TokenIds
    tokens_per_second: float | None
    video: VideoConfig
    video_patches: PatchConfig
    embeds: EmbedsShape | None
    audio: AudioConfig | None = None


def read_processor_config(model_path: str | Path, hf_config: Mapping[str, Any]) -> ProcessorConfig:
    """Read a checkpoint folder's picture and video settings. Raises CheckpointError when they are missing or unusable.

    `hf_config`: the content of config.json. The files are searched in transformers' order: "image_processor" and
    "video_processor" in processor_config.json first, then preprocessor_config.json. Videos have
    video_preprocessor_config.json before the latter.
    """
    folder = Path(model_path)
    if not has_tower(hf_config):
        return _parse_all(folder, {}, folder, {}, hf_config)  # of no effect
    source, raw = _read_settings(folder, "image_processor", "preprocessor_config.json")
    video_source, raw_video = _read_settings(
        folder, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json"
    )
    return _parse_all(source, raw, video_source, raw_video, hf_config)


def _parse_all(
    source: Path, raw: Mapping[str, Any], video_source: Path, raw_video: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> ProcessorConfig:
    try:
        audio = read_audio_config(raw, hf_config)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: unusable sound settings: {error!r}") from error
    try:
        patches = _parse_patches(raw, hf_config)
        ids = TokenIds(
            **{name: int(hf_config.get(key, default)) for name, (key, default) in _IDS.items()},
            **{name: int(hf_config[key]) for name, key in _AUDIO_IDS.items() if audio is not None},
        )
        min_pixels, max_pixels = _parse_budget(raw)
        embeds = _parse_embeds(hf_config.get("vision_config") or {})
        tokens_per_second = (hf_config.get("vision_config") or {}).get("tokens_per_second")
        tokens_per_second = None if tokens_per_second is None else float(tokens_per_second)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: unusable picture settings: {error}") from error
    try:
        video, video_patches = _parse_video(raw_video), _parse_patches(raw_video, hf_config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{video_source}: unusable video settings: {error}") from error
    return ProcessorConfig(
        patches=patches,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        token_ids=ids,
        tokens_per_second=tokens_per_second,
        video=video,
        video_patches=video_patches,
        embeds=embeds,
        audio=audio,
    )


def _read_settings(folder: Path, section: str, *names: str) -> tuple[Path, dict[str, Any]]:
    nested = read_json(folder, "processor_config.json", required=False).get(section)
    if nested is not None:
        return folder / "processor_config.json", nested
    path = next((folder / name for name in names if (folder / name).is_file()), folder / names[-1])
    if not path.is_file():
        raise CheckpointError(f"{folder} has no preprocessor_config.json, which says how pictures are prepared")
    return path, read_json(folder, path.name)


def _parse_patches(raw: Mapping[str, Any], hf_config: Mapping[str, Any]) -> PatchConfig:
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
    for name, towers in (("patch_size", None), ("merge_size", "spatial_merge_size"), ("temporal_patch_size", None)):
        ours, theirs = getattr(patches, name), vision.get(towers or name)
        if theirs is not None and int(theirs) != ours:
            raise ValueError(f"{name} is {ours} here but {theirs} in config.json's vision_config")
    return patches


def _parse_video(raw: Mapping[str, Any]) -> VideoConfig:
    min_pixels, max_pixels = _pick(raw, *_SMALLEST), _pick(raw, *_LARGEST)
    if min_pixels is not None and max_pixels is not None and not 0 < min_pixels <= max_pixels:
        raise ValueError(f"size {min_pixels} to {max_pixels} is no range")
    counts = ("num_frames", "min_frames", "max_frames", "max_video_tokens")
    fps, cap = raw.get("fps"), raw.get("cap_pixels_per_frame")
    return VideoConfig(
        **{name: int(raw[name]) for name in counts if raw.get(name) is not None},
        fps=None if fps is None else float(fps),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        cap_pixels_per_frame=None if cap is None else bool(cap),
    )


def _parse_budget(raw: Mapping[str, Any]) -> tuple[int, int]:
    smallest, largest = _pick(raw, *_SMALLEST), _pick(raw, *_LARGEST)
    min_pixels = _DEFAULT_MIN_PIXELS if smallest is None else smallest
    max_pixels = _DEFAULT_MAX_PIXELS if largest is None else largest
    if not 0 < min_pixels <= max_pixels:
        raise ValueError(f"min_pixels {min_pixels} and max_pixels {max_pixels} are no range")
    return min_pixels, max_pixels


def _parse_embeds(vision: Mapping[str, Any]) -> EmbedsShape | None:
    # Qwen2-VL calls the width of rows hidden_size, and the tower's own embed_dim.
    width = vision.get("out_hidden_size", vision.get("hidden_size"))
    layers = vision.get("deepstack_visual_indexes") or ()
    return None if width is None else EmbedsShape(width=int(width), deepstack=len(layers))


def _pick(raw: Mapping[str, Any], own: str, in_size: str) -> int | None:
    """Return an area limit in any of the spellings that checkpoints use. min_pixels and max_pixels win over `size`."""
    size = raw.get("size") or {}
    found = (value for value in (raw.get(own), size.get(in_size), size.get(own)) if value is not None)
    value = next(found, None)
    return None if value is None else int(value)
