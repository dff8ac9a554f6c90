"""Reports how a medium was processed, in plain values, for clients that ask."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from processors.families.base import Coordinates, MultimodalProcessor, ProcessedMedium, modality_of
from processors.image.sizes import AUTO_PIXELS_SETTING
from processors.knobs import Clamp
from processors.processed import ProcessedAudio, ProcessedVideo
from processors.pruning import BEFORE, NOTHING_LEAVES


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoReport:
    """A video's part of a report.

    `frame_indices`, `timestamps`: the frames used, by number and in seconds. `patch_timestamps`: of each temporal
    patch. `source_fps`, `source_frames`, `source_duration_s`: of the original video. `sampling`: the rule that chose
    the frames ("transformers", "qwen-vl-utils", "time-grid"; "all" frames of a file, or a "list" of frames;
    "adaptive", "question"). `sample_fps`: frames used per second. `probes`, `scene_changes`: frames of the first pass
    of adaptive sampling, and the seconds at which it saw new scenes. `nearest`: the seconds nearest to the question,
    the nearest first. `fallback`: why frames were not chosen by the question.
    """

    frame_indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    patch_timestamps: tuple[float, ...]
    source_fps: float
    source_frames: int
    source_duration_s: float
    sampling: str
    sample_fps: float
    probes: int
    scene_changes: tuple[float, ...]
    nearest: tuple[float, ...]
    fallback: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningReport:
    """What left a medium, in tokens. `repeats`: exact repeats; `before_tower`: of these, the ones that are not encoded.
    `unchanged`: by `video_pruning_rate`, which is the rate.

    `tokens_of_patches`: tokens of each temporal patch.
    """

    repeats: int
    before_tower: int
    unchanged: int
    video_pruning_rate: float
    tokens_of_patches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioReport:
    """A sound's part of a report, or of a clip's that is heard.

    `seconds`: of what the model hears. `source_rate`, `channels`: of the file. `tokens`: pad tokens in the prompt.
    """

    seconds: float
    source_rate: int
    channels: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MediumReport:
    """A report on one medium of a request.

    `param`: its place in the request. `source_size`, `final_size`: (width, height) in pixels, upright. `grid_thw`:
    patches in time, height and width. `tokens`: pad tokens in the prompt. `coordinates`: how the model gives places in
    it. `clamps`: values that server limits changed. `ignored`: knobs without effect. `video`: None for a picture.
    `audio`: None for what is not heard. Sizes of a sound are 0. `pruning`: None if nothing was to leave it.
    """

    kind: Literal["image", "video", "audio"]
    param: str
    source_size: tuple[int, int]
    final_size: tuple[int, int]
    grid_thw: tuple[int, int, int]
    tokens: int
    coordinates: Coordinates
    clamps: tuple[Clamp, ...]
    ignored: tuple[str, ...] = ()
    video: VideoReport | None = None
    audio: AudioReport | None = None
    pruning: PruningReport | None = None

    @property
    def pruned_tokens(self) -> int:
        """Tokens that the medium would have besides."""
        return 0 if self.pruning is None else self.pruning.repeats + self.pruning.unchanged

    @property
    def patches(self) -> int:
        """Patches that a tower encodes, if no cache has them."""
        total, left = math.prod(self.grid_thw), 0 if self.pruning is None else self.pruning.before_tower
        return total - total // (self.tokens + self.pruned_tokens) * left

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the source per pixel of the resized picture, along x and y."""
        if self.kind == "audio":
            return 1.0, 1.0
        return self.source_size[0] / self.final_size[0], self.source_size[1] / self.final_size[1]

    def warnings(self) -> list[str]:
        """Return a sentence for each request value that was changed or ignored."""
        ignored = [f"{name} has no effect on this {self.kind}" for name in self.ignored]
        if self.video is not None and self.video.fallback:
            ignored.append(f"frames were chosen by changes, not by the question: {self.video.fallback}")
        return [f"{self.param}: {what}" for what in [*map(self._in_words, self.clamps), *ignored]]

    def _in_words(self, clamp: Clamp) -> str:
        if clamp.setting != AUTO_PIXELS_SETTING:
            return str(clamp)
        (width, height), (new_width, new_height) = self.source_size, self.final_size
        what = "the picture" if self.kind == "image" else "each frame"
        return (
            f"{what} of {width}x{height} pixels was scaled down to {new_width}x{new_height}: {clamp.limit} pixels are "
            "what this machine encodes in the time set for it (--max-pixels auto, --max-pixels-auto-s); "
            "--max-pixels checkpoint gives the full size"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report in the API's form."""
        return {
            # tuples as lists, which JSON would make of them, too
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()},
            "source_size": _size(self.source_size),
            "final_size": _size(self.final_size),
            "scale": dict(zip("xy", self.scale, strict=True)),
        }


def report_medium(processor: MultimodalProcessor, medium: ProcessedMedium, param: str) -> MediumReport:
    """Report on a medium that `processor` made. `param`: its place in the request."""
    video = medium if isinstance(medium, ProcessedVideo) else None
    sound = medium if isinstance(medium, ProcessedAudio) else None if video is None else video.sound
    patch = (processor.config.patches if video is None else processor.config.video_patches).patch_size
    return MediumReport(
        kind=modality_of(medium).value,
        param=param,
        source_size=medium.source_size,
        final_size=(0, 0) if medium is sound else (medium.grid_thw[2] * patch, medium.grid_thw[1] * patch),
        grid_thw=medium.grid_thw,
        tokens=medium.num_tokens,
        coordinates=processor.coordinates,
        clamps=(*medium.clamps, *(() if video is None or sound is None else sound.clamps)),
        ignored=medium.ignored,
        video=None if video is None else _video(video),
        audio=None if sound is None else _audio(sound),
        pruning=_pruning(processor, medium),
    )


def _audio(sound: ProcessedAudio) -> AudioReport:
    return AudioReport(
        seconds=sound.seconds, source_rate=sound.source_rate, channels=sound.channels, tokens=sound.num_tokens
    )


def _pruning(processor: MultimodalProcessor, medium: ProcessedMedium) -> PruningReport | None:
    if medium.pruning == NOTHING_LEAVES:
        return None
    left_out = math.prod(medium.grid_thw) // processor.config.patches.merge_size**2 - medium.num_tokens
    return PruningReport(
        repeats=0 if medium.counts else left_out,
        before_tower=sum(part.count(BEFORE) for part in medium.kept),
        unchanged=left_out if medium.counts else 0,
        video_pruning_rate=medium.pruning.rate,
        tokens_of_patches=medium.patch_tokens,
    )


def _video(video: ProcessedVideo) -> VideoReport:
    return VideoReport(
        frame_indices=video.frame_indices,
        timestamps=video.frame_times,
        patch_timestamps=video.patch_times,
        source_fps=video.source_fps,
        source_frames=video.source_frames,
        source_duration_s=video.source_frames / video.source_fps,
        sampling=video.sampling,
        sample_fps=video.sample_fps,
        probes=video.probes,
        scene_changes=video.scene_changes,
        nearest=video.nearest,
        fallback=video.fallback,
    )


def report_json(media: Iterable[MediumReport]) -> dict[str, Any]:
    """Return a request's `mm_report`, with its media in prompt order."""
    return {"media": [medium.as_json() for medium in media]}


def _size(size: tuple[int, int]) -> dict[str, int]:
    return {"width": size[0], "height": size[1]}
