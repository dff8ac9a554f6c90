"""Videos that come as lists of frames: whatever of them are URLs is fetched, and uploaded files are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TypeAlias

from PIL import Image

from processors.fetch.fetching import MediaFetcher, is_remote
from processors.fetch.media_file import MediaFile
from processors.inputs import Modality
from processors.video.side_by_side import side_by_side
from vlmserve_common.errors import BadRequestError

FetchedFrame: TypeAlias = bytes | Image.Image
Frame: TypeAlias = str | MediaFile | FetchedFrame


class FrameLists:
    """Fetches lists of frames, blocking. Thread-safe.

    max_frames: most in a list. at_a_time: URLs of one list fetched side by side, in threads of its own, so that lists
    never wait for each other.
    """

    def __init__(self, fetcher: MediaFetcher, *, max_frames: int, at_a_time: int) -> None:
        self._fetcher = fetcher
        self._max_frames = max_frames
        self._at_a_time = at_a_time

    def fetch(self, frames: Sequence[Frame], param: str | None) -> tuple[FetchedFrame, ...]:
        """The frames, in order, as long as they are no larger together than a video.

        Raises BadRequestError (with `param`): of frames that cannot be fetched, that of the first one.
        """
        limit = self._fetcher.limit(Modality.VIDEO)
        if len(frames) > self._max_frames:
            raise BadRequestError(
                f"the list of frames has {len(frames)} frames; the limit is {self._max_frames} (setting "
                "--max-video-frames)",
                param=param,
                code="too_many_frames",
            )
        fetcher = self._fetcher.child()
        calls = [partial(_fetch, fetcher, frame, param) for frame in frames]
        if any(isinstance(frame, str) and is_remote(frame) for frame in frames):
            found = side_by_side(calls, self._at_a_time, call_off=fetcher.close)
        else:
            found = ((place, call()) for place, call in enumerate(calls))
        fetched: dict[int, FetchedFrame] = {}
        total = 0
        with closing(found):
            for place, frame in found:
                fetched[place] = frame
                total += len(frame) if isinstance(frame, bytes) else 0
                if total > limit.bytes:
                    raise BadRequestError(
                        f"the frames are larger together than {limit.bytes} bytes (setting {limit.setting})",
                        param=param,
                        code="invalid_media_url",
                    )
        return tuple(fetched[place] for place in range(len(frames)))


def _fetch(fetcher: MediaFetcher, frame: Frame, param: str | None) -> FetchedFrame:
    return fetcher.fetch(frame, param=param) if isinstance(frame, str | MediaFile) else frame
