"""Turns one clip, or a list of frames, into patches.

Frames are resized and cut one temporal patch after the other. So memory holds the result and two full-size frames for
each decoding thread, not the clip. Only frames that are resized later are all kept at full size.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from processors.hashing import fewer_digest, media_digest, original_digest, patch_digest
from processors.inputs import Modality
from processors.processed import ProcessedVideo
from processors.pruning import NOTHING_LEAVES, Pruning, kept_counts, without_repeats
from processors.resize import (
    Allocate,
    PatchConfig,
    fit_to_resize_later,
    frames_to_patches,
    planes,
    resize_frames,
)
from processors.video.adaptive import FirstLook, adapt, look
from processors.video.frame_choice import ClipInfo, FrameChoice
from processors.video.options import VideoKnobs, VideoLimits, check_knobs
from processors.video.rules import VideoRules
from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    from processors.video.decoding import Clip

_CODE = "invalid_value"
# A clip of which exact repeats leave may have so many times the tokens of the context before: it is decoded whole.
_MOST_REPEATS = 8
# qwen_vl_utils' rate of frames that come as a list, where nothing is said
_LIST_FPS = 2.0
_OF_FILES = ("num_frames", "min_frames", "max_frames", "do_sample_frames", "video_start", "video_end", "sampling")


_T = TypeVar("_T")
_Frames: TypeAlias = AbstractContextManager[Iterable[np.ndarray]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """How to read frames [H, W, 3], in stretches side by side.

    `opens`: makes each stretch's frames. `starts`: the temporal patch at which each stretch begins. `threads`:
    stretches read at a time. `call_off`: stops the reading when the frames are no longer needed.
    """

    opens: Sequence[Callable[[], _Frames]]
    starts: Sequence[int] = (0,)
    threads: int = 1
    call_off: Callable[[], None] = lambda: None


class VideoProcessor:
    """Processes the clips of one checkpoint. It has no state, so any number of threads can use it.

    `resize_later`, `pruning`: as in `ProcessorLimits`. `even_times`: as in `MultimodalProcessor`.
    """

    def __init__(
        self,
        rules: VideoRules,
        patches: PatchConfig,
        limits: VideoLimits,
        allocate: Allocate = np.empty,
        *,
        resize_later: bool = False,
        pruning: Pruning = NOTHING_LEAVES,
        even_times: bool = False,
    ) -> None:
        self.limits = limits
        self._resize_later = resize_later and not rules.resize_in_float
        self._allocate = allocate
        self._pruning = pruning
        self._even_times = even_times
        self._rules = rules
        self._patches = patches

    def process_clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        """Process a video file's bytes. Raises BadRequestError."""
        self._check(knobs)
        try:
            return self._process_file(data, knobs, later=self._resize_later)
        except OtherSizeError:
            return self._process_file(data, knobs, later=False)

    def look(self, data: bytes, knobs: VideoKnobs) -> FirstLook:
        """Return the frames of a video file that are to be compared with a question. Raises BadRequestError."""
        self._check(knobs)
        clip, choice = self._opened(data, knobs)
        return look(choice, clip.info.times, clip.info.rate, clip.keys, clip.read, knobs)

    def _check(self, knobs: VideoKnobs) -> None:
        check_knobs(knobs)
        if knobs.sampling is not None and self._even_times:
            raise BadRequestError(
                f"sampling {knobs.sampling} is not for this model: it takes the frames of a video to be evenly spread "
                "in time",
                code="invalid_value",
            )

    def _opened(self, data: bytes, knobs: VideoKnobs) -> tuple[Clip, FrameChoice]:
        """Return a clip, and the rule's choice of its frames."""
        from processors.video.decoding import Clip  # only who gets a video needs PyAV

        clip = Clip(data, self.limits)
        choice = self._rules.choose(clip.info.times, clip.info.rate, knobs)
        self._check_count("the request asks for", len(choice.indices))
        return clip, choice

    def _process_file(self, data: bytes, knobs: VideoKnobs, *, later: bool) -> ProcessedVideo:
        clip, choice = self._opened(data, knobs)
        if knobs.sampling is not None:
            choice = adapt(choice, clip.info.times, clip.info.rate, clip.keys, clip.read, knobs)
        return self._process(self._reading(clip, choice.indices), choice, clip.info, knobs, later=later)

    def process_frames(self, frames: Iterator[np.ndarray], count: int, knobs: VideoKnobs) -> ProcessedVideo:
        """Process `count` RGB frames uint8 [H, W, 3], all used, `knobs.fps` per second. Raises BadRequestError."""
        check_knobs(knobs)
        if not count:
            raise BadRequestError("the video is an empty list of frames", code=_CODE)
        self._check_count("the list of frames has", count)
        frames = _checked(frames, self.limits.max_decode_s)
        first = next(frames)
        fps = knobs.fps or _LIST_FPS
        choice = FrameChoice(
            indices=tuple(range(count)),
            times=tuple(i / fps for i in range(count)),
            fps=fps,
            rule="list",
            ignored=knobs.given(_OF_FILES),
        )
        height, width = first.shape[:2]
        info = ClipInfo(width=width, height=height, rate=fps, times=choice.times)
        every = chain([first], frames)
        reading = _Reading(opens=[lambda: nullcontext(every)])
        return self._process(reading, choice, info, knobs, later=self._resize_later)

    def process_units(self, units: Sequence[bytes], knobs: VideoKnobs) -> ProcessedVideo:
        """Process the frames `knobs.h264_frames` of an H.264 stream's access units. Raises BadRequestError."""
        from processors.video.access_units import decode_units  # only who gets a stream needs PyAV

        wanted = knobs.h264_frames or ()
        if not wanted or sorted(wanted) != list(wanted) or not 0 <= wanted[0] <= wanted[-1] < len(units):
            raise BadRequestError(
                f"h264_frames is {list(wanted)}; it must name some of {len(units)} access units", code=_CODE
            )
        return self.process_frames(decode_units(units, wanted, self.limits), len(wanted), knobs)

    def _check_count(self, what: str, count: int) -> None:
        limit = self.limits.max_frames
        if count > limit:
            raise BadRequestError(
                f"{what} {count} frames; the limit is {limit} (setting --max-video-frames)", code="too_many_frames"
            )

    def _reading(self, clip: Clip, indices: Sequence[int]) -> _Reading:
        depth = self._patches.temporal_patch_size
        parts = clip.stretches(indices, depth)
        if len(parts) == 1:
            return _Reading(opens=[lambda: closing(ahead(clip.read(indices, clip.threads)))])

        def opening(part: range) -> Callable[[], _Frames]:
            return lambda: closing(clip.read(indices[part.start : part.stop]))

        starts = [part.start // depth for part in parts]
        return _Reading(opens=[*map(opening, parts)], starts=starts, threads=clip.threads, call_off=clip.call_off)

    def _process(
        self, reading: _Reading, choice: FrameChoice, info: ClipInfo, knobs: VideoKnobs, *, later: bool
    ) -> ProcessedVideo:
        depth, factor = self._patches.temporal_patch_size, self._patches.factor
        count = len(choice.indices)
        height, width, clamps = self._rules.fit(count, info.height, info.width, knobs)
        t = math.ceil(count / depth)
        places = (height // factor) * (width // factor)
        pruning = self._pruning_of(knobs)
        counts = kept_counts(t, places, pruning.rate)
        num_tokens = sum(counts) or t * places
        self._check_tokens(num_tokens, count, (width, height), _MOST_REPEATS if pruning.skip_repeats else 1)
        source = info.height, info.width
        later = later and not pruning.skip_repeats and fit_to_resize_later(t * depth, source, (height, width))
        grid = (t, height // self._patches.patch_size, width // self._patches.patch_size)
        feature, digests = self._cut(reading, grid, source if later else None)
        kept: tuple[bytes, ...] = ()
        if pruning.skip_repeats:
            kept, feature, digests = without_repeats(feature, grid, digests, self._patches.merge_size, self._allocate)
            feature.flags.writeable = False
            num_tokens = sum(part.count(1) for part in kept) or num_tokens
            self._check_tokens(num_tokens, count, (width, height))
        overruled = ("skip_repeats",) if knobs.skip_repeats and not pruning.skip_repeats else ()
        times = [*choice.times, *repeat(choice.times[-1], t * depth - count)]
        return ProcessedVideo(
            digest=fewer_digest(media_digest(Modality.VIDEO, grid, digests), kept, counts),
            patch_digests=digests,
            grid_thw=grid,
            feature=feature,
            normalization=self._patches.normalization(frames=depth),
            resizing=self._patches.resizing if later else None,
            num_tokens=num_tokens,
            kept=kept,
            counts=counts,
            pruning=pruning,
            source_size=(info.width, info.height),
            frame_indices=choice.indices,
            frame_times=choice.times,
            # `_calculate_timestamps` of transformers' Qwen3VLProcessor
            patch_times=tuple((times[i] + times[i + depth - 1]) / 2 for i in range(0, len(times), depth)),
            second_per_grid_t=depth / choice.fps,
            source_fps=info.rate,
            source_frames=info.num_frames,
            sampling=choice.rule,
            sample_fps=choice.fps,
            probes=choice.probes,
            scene_changes=choice.scene_changes,
            nearest=choice.nearest,
            fallback=choice.fallback,
            clamps=choice.clamps + clamps,
            ignored=tuple(dict.fromkeys((*choice.ignored, *self._rules.ignored(knobs), *overruled))),
        )

    def _check_tokens(self, tokens: int, count: int, size: tuple[int, int], times: int = 1) -> None:
        """Raise BadRequestError for a clip of so many times the context. `count`, `size`: of its frames."""
        limit = self.limits.max_tokens
        if limit is not None and tokens >= limit * times:
            more = f"; before repeats leave, it may be less than {times} times that" if times > 1 else ""
            raise BadRequestError(
                f"the video takes {tokens} tokens ({count} frames of {size[0]}x{size[1]} pixels), the context has "
                f"{limit} (setting --max-model-len): ask for less by fps, max_frames, max_pixels or total_pixels{more}",
                code="context_length_exceeded",
            )

    def _pruning_of(self, knobs: VideoKnobs) -> Pruning:
        """Return what leaves a clip. A rate puts exact repeats aside: there would be no place to compare with."""
        own = self._pruning
        rate = own.rate if knobs.video_pruning_rate is None else float(knobs.video_pruning_rate)
        skips = own.skip_repeats if knobs.skip_repeats is None else knobs.skip_repeats
        return Pruning(skip_repeats=skips and not rate, rate=rate)

    def _cut(
        self, reading: _Reading, grid: tuple[int, int, int], original: tuple[int, int] | None
    ) -> tuple[np.ndarray, tuple[bytes, ...]]:
        """Return the read-only feature and the digests. `original`: (height, width) of frames to be resized later."""
        config, t = self._patches, grid[0]
        depth = config.temporal_patch_size
        shape = (depth, *original, 3) if original else (grid[1] * grid[2], config.row_width(depth))
        feature = self._allocate((t, *shape), np.uint8)
        ends = [*reading.starts[1:], t]
        calls = [
            partial(self._cut_stretch, opened, feature[start:end], grid[1:], later=original is not None)
            for opened, start, end in zip(reading.opens, reading.starts, ends, strict=True)
        ]
        if len(calls) == 1:
            digests = calls[0]()
        else:
            # The longest first: with the shortest last, threads are done at about the same time.
            longest = sorted(range(len(calls)), key=lambda place: reading.starts[place] - ends[place])
            digests = list(chain.from_iterable(side_by_side(calls, reading.threads, reading.call_off, longest)))
        rows = feature.reshape(-1, *shape[1:])
        rows.flags.writeable = False
        return rows, tuple(digests)

    def _cut_stretch(
        self, opened: Callable[[], _Frames], feature: np.ndarray, grid: tuple[int, int], *, later: bool
    ) -> list[bytes]:
        with opened() as frames:
            if later:
                return take_frames(frames, feature, grid, self._patches)
            return cut_frames(frames, feature, grid, self._patches, in_float=self._rules.resize_in_float)


def _checked(frames: Iterator[np.ndarray], limit_s: float) -> Iterator[np.ndarray]:
    """Check a list's frames: one size for all, and the time limit of a clip."""
    deadline = time.monotonic() + limit_s
    shape: tuple[int, ...] | None = None
    for place, frame in enumerate(frames):
        if time.monotonic() > deadline:
            raise BadRequestError(
                f"decoding the list of frames takes longer than {limit_s:g} s, the limit (setting "
                f"--max-video-decode-s), at frame {place}",
                code="video_too_costly",
            )
        shape = shape or frame.shape
        if frame.shape != shape:
            raise BadRequestError(
                f"frame {place} of the list has {frame.shape[1]}x{frame.shape[0]} pixels, the first one "
                f"{shape[1]}x{shape[0]}: all frames of a video must have one size",
                code="invalid_video",
            )
        yield frame


class OtherSizeError(Exception):
    """A frame's size differs from the frames before it, so they cannot travel as they are."""


def cut_frames(
    frames: Iterable[np.ndarray], feature: np.ndarray, grid: tuple[int, int], config: PatchConfig, *, in_float: bool
) -> list[bytes]:
    """Fill feature uint8 [t, h*w, row width] with the patches of frames uint8 [H, W, 3]; return the digests.

    The last frame is repeated to fill the last temporal patch. `in_float`: see `resize_frames`.
    """
    height, width = grid[0] * config.patch_size, grid[1] * config.patch_size
    group = np.empty((config.temporal_patch_size, 3, height, width), np.uint8)
    digests: list[bytes] = []
    resized = (planes(resize_frames(one[None], height, width, config.resample, in_float=in_float))[0] for one in frames)
    for place in feature:
        for at in range(len(group)):
            # a filled up frame stays as it is from the place before
            group[at] = next(resized, group[at - 1])
        frames_to_patches(group.transpose(0, 2, 3, 1), config, out=place)
        digests.append(patch_digest(grid, group, config))
    return digests


def take_frames(
    frames: Iterable[np.ndarray], feature: np.ndarray, grid: tuple[int, int], config: PatchConfig
) -> list[bytes]:
    """Fill feature uint8 [t, temporal_patch_size, H, W, 3] with unresized frames; return the digests.

    The last frame is repeated as in `cut_frames`. Raises OtherSizeError.
    """
    digests: list[bytes] = []
    originals = iter(frames)
    for place in feature:
        for at in range(len(place)):
            frame = next(originals, place[at - 1])
            if frame.shape != place.shape[1:]:
                raise OtherSizeError
            place[at] = frame
        digests.append(original_digest(grid, place, config))
    return digests


def ahead(items: Generator[_T, None, None], count: int = 2) -> Generator[_T, None, None]:
    """Yield `items`, which one extra thread makes at most `count` ahead of their use.

    An error of making an item is raised when the item is asked for. When this iterator ends or is closed, `items` is
    closed and the thread has ended.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="media-ahead")

    def make() -> tuple[_T] | None:
        for item in items:
            return (item,)
        return None

    try:
        coming = deque(thread.submit(make) for _ in range(count))
        while (made := coming.popleft().result()) is not None:
            yield made[0]
            coming.append(thread.submit(make))
    finally:
        thread.shutdown(cancel_futures=True)
        items.close()


def side_by_side(
    calls: Sequence[Callable[[], _T]], most: int, call_off: Callable[[], None], begin: Iterable[int]
) -> list[_T]:
    """Return the result of each call; `most` run at a time, each in a thread of its own.

    `begin`: every place in `calls`, in the order in which they start. If calls fail, the failure of the first one by
    place is raised, once all before it are done. Calls that have not started are dropped. `call_off` hurries the
    running ones, and the function waits for them.
    """
    failures: list[int] = []  # places of failed calls: calls behind them do not start

    def run(place: int) -> _T:
        if any(place > other for other in failures):
            raise CancelledError
        try:
            return calls[place]()
        except BaseException:
            failures.append(place)
            raise

    threads = ThreadPoolExecutor(most, thread_name_prefix="side-by-side")
    try:
        futures = {place: threads.submit(run, place) for place in begin}
        return [futures[place].result() for place in range(len(calls))]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        call_off()
        threads.shutdown()
