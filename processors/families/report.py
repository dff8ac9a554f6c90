"""Reports how a picture or video was processed, in plain values, for clients that ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from processors.families.base import Coordinates, MultimodalProcessor, ProcessedMedium
from processors.image.sizes import AUTO_PIXELS_SETTING
from processors.knobs import Clamp
from processors.video.clips import ProcessedVideo


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoReport:
    """A video's part of a report.

    `frame_indices`, `timestamps`: the frames used, by number and in seconds. `patch_timestamps`: of each temporal
    patch. `source_fps`, `source_frames`, `source_duration_s`: of the original video. `sampling`: the rule that chose
    the frames ("transformers", "qwen-vl-utils", "time-grid"; "all" frames of a file, or a "list" of frames).
    `sample_fps`: frames used per second.
    """

    frame_indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    patch_timestamps: tuple[float, ...]
    source_fps: float
    source_frames: int
    source_duration_s: float
    sampling: str
    sample_fps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MediumReport:
    """A report on one medium of a request.

    `param`: its place in the request. `source_size`, `final_size`: (width, height) in pixels, upright. `grid_thw`:
    patches in time, height and width. `tokens`: pad tokens in the prompt. `coordinates`: how the model gives places in
    it. `clamps`: values that server limits changed. `ignored`: knobs without effect. `video`: None for a picture.
    """

    kind: Literal["image", "video"]
    param: str
    source_size: tuple[int, int]
    final_size: tuple[int, int]
    grid_thw: tuple[int, int, int]
    tokens: int
    coordinates: Coordinates
    clamps: tuple[Clamp, ...]
    ignored: tuple[str, ...] = ()
    video: VideoReport | None = None

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the source per pixel of the resized picture, along x and y."""
        return self.source_size[0] / self.final_size[0], self.source_size[1] / self.final_size[1]

    def warnings(self) -> list[str]:
        """Return a sentence for each request value that was changed or ignored."""
        ignored = [f"{name} has no effect on this {self.kind}" for name in self.ignored]
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
    patch = (processor.config.patches if video is None else processor.config.video_patches).patch_size
    return MediumReport(
        kind="image" if video is None else "video",
        param=param,
        source_size=medium.source_size,
        final_size=(medium.grid_thw[2] * patch, medium.grid_thw[1] * patch),
        grid_thw=medium.grid_thw,
        tokens=medium.num_tokens,
        coordinates=processor.coordinates,
        clamps=medium.clamps,
        ignored=medium.ignored,
        video=None if video is None else _video(video),
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
    )


def report_json(media: Iterable[MediumReport]) -> dict[str, Any]:
    """Return a request's `mm_report`, with its media in prompt order."""
    return {"media": [medium.as_json() for medium in media]}


def _size(size: tuple[int, int]) -> dict[str, int]:
    return {"width": size[0], "height": size[1]}
