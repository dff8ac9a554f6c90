"""Live video in a conversation: frames join it by whole temporal patches, and old ones leave it.

The conversation then has the prompt of one that came whole with the same frames. Nothing here waits or keeps a state.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from processors.processed import ProcessedVideo
from processors.video.live import RULE, joined, live_patch, without_first
from vlmserve.frontend.chat_messages import Message
from vlmserve.frontend.dialogue import Dialogue
from vlmserve.frontend.requests import Slid
from vlmserve_common.errors import BadRequestError

_STAYS = 0.75
_WHOLE = {"skip_repeats": False, "video_pruning_rate": 0}  # what is left out depends on all frames of a clip
_NEAR = 0.1
_EARLY = 0.1  # frames may come before they are due, by this part of the time between two
_MOST_S = 1e7
_MOST_POSITIONS = 32768  # of a window that slides, before what stays is computed as a fresh prompt
SLID = (
    "old video has left a window that slides: what stayed keeps its KV, which was computed with it, so the answer is "
    "near that of a prompt without it, and not equal"
)
"""The warning of answers about such a conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRules:
    """How frames become a video.

    fps: frames used a second, at most. depth: frames of a temporal patch. paced: positions count seconds between
    temporal patches, of which a video has one number (Qwen2.5-VL). max_pixels: of a frame, if nothing is said.
    keep_seconds, max_tokens: of all live video in the conversation; None is no limit. positions_of: see
    `MultimodalProcessor`; there if the window slides, so that what stays is not computed again.
    """

    fps: float
    depth: int
    paced: bool
    max_pixels: int
    keep_seconds: float | None = None
    max_tokens: int | None = None
    positions_of: Callable[[ProcessedVideo], int] | None = None

    @property
    def interval(self) -> float:
        """Return the seconds between two temporal patches of frames that come at the full rate."""
        return self.depth / self.fps

    def part(self, frames: Sequence[Any], *, sized: bool) -> dict[str, Any]:
        """Return the message part of the frames of one temporal patch, to be loaded: pictures, or all `Units`. There
        are always as many, so frames of one size are resized to one size. sized: the client says how large frames
        are."""
        frames = [*frames, *[frames[-1]] * (self.depth - len(frames))]
        part: dict[str, Any] = {"type": "video", "video": frames, "sample_fps": self.fps, **_WHOLE}
        if isinstance(frames[0], Units):
            part |= _joined_units(frames)
        if not sized:
            part["max_pixels"] = self.max_pixels
        return part

    def patch(self, video: ProcessedVideo, times: Sequence[float]) -> ProcessedVideo:
        """Return a loaded part as a temporal patch. times: of its frames, in seconds; a missing last one is that of the
        one before."""
        times = (*times, *[times[-1]] * (self.depth - len(times)))
        return live_patch(video, times, self.interval)

    def shown(self, dialogue: Dialogue, patch: ProcessedVideo) -> Dialogue:
        """Return a conversation with one more temporal patch. It continues the live video that was shown last, unless
        something came between or its size is another one."""
        last = dialogue.last_part
        video = None if last is None else last.get("video")
        if isinstance(video, ProcessedVideo) and video.sampling == RULE and video.grid_thw[1:] == patch.grid_thw[1:]:
            kept = self._in_step(video, patch) if self.paced else video
            if kept is not None:
                return dialogue.with_last_part({"type": "video", "video": joined(kept, patch)})
        return dialogue.with_content([{"type": "video", "video": patch}])

    def _in_step(self, video: ProcessedVideo, patch: ProcessedVideo) -> ProcessedVideo | None:
        """Return a video with the seconds between its temporal patches; None if the next one comes at another time. The
        second one says what they are."""
        count, start = video.grid_thw[0], patch.frame_times[0] - video.frame_times[0]
        if count == 1 and not video.gone:
            interval = self.interval if abs(start - self.interval) <= _NEAR * self.interval else start
            return replace(video, second_per_grid_t=interval)
        interval = video.second_per_grid_t
        return video if abs(start - count * interval) <= interval / 2 else None

    def windowed(self, dialogue: Dialogue, salt: str | None = None) -> tuple[Dialogue, Slid | None]:
        """Return a conversation without the oldest temporal patches of live video, if there are too many, and where the
        KV of what stays is, if it slides. The rest is three quarters of what may stay, so that its KV is seldom
        computed again, or copied. salt: of requests about it (cache_salt)."""
        clips = [video for message in dialogue.messages for video in live_in(message)]
        if not clips or not self._is_over(clips):
            return dialogue, None
        stays = replace(
            self,
            keep_seconds=None if self.keep_seconds is None else _STAYS * self.keep_seconds,
            max_tokens=None if self.max_tokens is None else int(_STAYS * self.max_tokens),
        )
        forms = [dialogue.messages]
        while stays._is_over(clips) and (len(clips) > 1 or clips[0].grid_thw[0] > 1):
            count, most = 1, clips[0].grid_thw[0] - (len(clips) == 1)
            while count < most and stays._is_over(_without_oldest(clips, count)):
                count += 1
            clips = self._slid(clips, _without_oldest(clips, count))
            forms.append(tuple(_with_clips(dialogue.messages, clips)))
        if self.positions_of is not None and sum(map(self.positions_of, clips)) <= _MOST_POSITIONS:
            window = replace(dialogue, window=uuid.uuid4().hex).with_messages(forms[-1])
            return window, Slid(forms=tuple(forms[:-1]), cache_salt=dialogue.salt(salt) or "")
        clips = [replace(clip, gone=0, skipped=0) for clip in clips]
        return replace(dialogue, window="").with_messages(_with_clips(dialogue.messages, clips)), None

    def _slid(self, clips: Sequence[ProcessedVideo], stay: list[ProcessedVideo]) -> list[ProcessedVideo]:
        """Return the clips that stay, at the positions that they have among all clips, if the window slides."""
        if self.positions_of is None:
            return stay
        first, left = stay[0], self.positions_of(clips[0])
        if len(stay) == len(clips):
            first = replace(first, gone=first.gone + clips[0].grid_thw[0] - first.grid_thw[0])
            left -= self.positions_of(first)
        return [replace(first, skipped=first.skipped + left), *stay[1:]]

    def _is_over(self, clips: Sequence[ProcessedVideo]) -> bool:
        seconds, tokens = clips[-1].patch_times[-1] - clips[0].patch_times[0], sum(clip.num_tokens for clip in clips)
        return (self.keep_seconds is not None and seconds > self.keep_seconds) or (
            self.max_tokens is not None and tokens > self.max_tokens
        )


class FrameClock:
    """Turns the times of frames into seconds since the first one, and says which frames are used.

    fps: at most so many a second. clock: in seconds. now: the time of the last frame; None before the first one.
    """

    def __init__(self, fps: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fps, self._clock = fps, clock
        self._offset: float | None = None
        self._came = 0.0
        self._used: float | None = None
        self.now: float | None = None

    def restart(self) -> None:
        """Take times of another clock from here on. The time between the two clocks is that of this machine."""
        self._offset = None

    def take(self, time: float) -> tuple[float, bool]:
        """Return the seconds of a frame, and whether it is used. Raises BadRequestError for a time that is no number,
        or not later than the one before."""
        if not math.isfinite(time):
            raise _bad_time(f"a frame's time is {time}; it must be a number of seconds")
        came = self._clock()
        if self._offset is None:
            between = 0.0 if self.now is None else self.now + max(came - self._came, 1 / self._fps)
            self._offset = between - time
        now = time + self._offset
        if self.now is not None and now <= self.now:
            before = self.now - self._offset
            raise _bad_time(f"a frame's time is {time:g} s, and that of the one before {before:g} s: times must rise")
        if now > _MOST_S:
            raise _bad_time(f"a frame's time is {now:g} s behind the first one's, the limit is {_MOST_S:g} s")
        self.now, self._came = now, came
        due = self._used is None or (now - self._used) * self._fps >= 1 - _EARLY
        if due:
            self._used = now
        return now, due


def _without_oldest(clips: Sequence[ProcessedVideo], count: int) -> list[ProcessedVideo]:
    """Return clips without the first `count` temporal patches of the first one, which leaves if it has no more."""
    first, *others = clips
    return [without_first(first, count), *others] if count < first.grid_thw[0] else others


def _bad_time(message: str) -> BadRequestError:
    return BadRequestError(message, param="time", code="invalid_frame_time")


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The access units of an H.264 stream from a keyframe on. The last one is the frame's."""

    units: tuple[bytes, ...]


def _joined_units(frames: Sequence[Units]) -> dict[str, Any]:
    """Return the fields of a part with the frames of one stream."""
    units: tuple[bytes, ...] = ()
    numbers, start = list[int](), 0
    for frame in frames:
        new = frame.units
        if units[start:] == new[: len(units) - start]:  # of the same keyframe
            units = (*units[:start], *new)
        else:
            start, units = len(units), (*units, *new)
        numbers.append(len(units) - 1)
    return {"video": units, "h264_frames": tuple(numbers)}


def live_in(message: Message) -> list[ProcessedVideo]:
    """Return the live video of a message."""
    content = message.get("content")
    return [part["video"] for part in content if _is_live(part)] if isinstance(content, list | tuple) else []


def _is_live(part: Mapping[str, Any]) -> bool:
    video = part.get("video")
    return isinstance(video, ProcessedVideo) and video.sampling == RULE


def _with_clips(messages: Sequence[Message], clips: Sequence[ProcessedVideo]) -> list[Message]:
    """Return messages with these as their live video, the last ones. What comes before them is left out."""
    left, found = list(clips), list[Message]()
    for message in reversed(messages):
        if live_in(message):
            parts: list[Mapping[str, Any]] = []
            for part in reversed(message["content"]):
                if not _is_live(part):
                    parts.append(part)
                elif left:
                    parts.append({"type": "video", "video": left.pop()})
            message = {**message, "content": parts[::-1]}
        found.append(message)
    return found[::-1]
