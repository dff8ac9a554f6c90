"""Opens a video file in memory by PyAV, within limits. The content decides its format."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from processors.formats import INVALID_VIDEO, file_format, first_bytes
from processors.formats import words as plain_words
from processors.video.options import VideoLimits
from vlmserve_common.errors import BadRequestError

MAX_RATE = 240
"""Frames per second of the fastest clip. Together with the duration it bounds the list of frames."""


class VideoFile:
    """A video file. Raises BadRequestError if it is none. `format`: FFmpeg's name of its format."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self.data = data
        self.limits = limits
        self.format = _format_of(data)

    @contextlib.contextmanager
    def open(self, threads: int) -> Iterator[tuple[InputContainer, VideoStream]]:
        """Open the video stream, to be decoded by so many threads. Several can be open at a time.

        Raises BadRequestError, also for errors of FFmpeg inside the `with` block.
        """
        # max_pixels makes FFmpeg refuse frames before it allocates them.
        options = {"max_pixels": str(self.limits.max_frame_pixels)}
        try:
            with av.open(
                io.BytesIO(self.data), "r", format=self.format, options=options, metadata_errors="replace"
            ) as container:
                stream = _video_stream(container)
                if stream.codec_context is None:
                    raise BadRequestError("the video's codec is not supported", code=INVALID_VIDEO)
                check_frame_size(stream.width, stream.height, self.limits)
                stream.codec_context.options = options
                stream.thread_type = "AUTO"
                stream.codec_context.thread_count = threads
                yield container, stream
        except av.error.ArgumentError as error:  # what FFmpeg says of frames above max_pixels
            raise BadRequestError(
                f"the video's frames have more than {self.limits.max_frame_pixels} pixels, the limit (setting "
                "--max-video-frame-pixels), or their size is not valid",
                code="video_too_large",
            ) from error
        except av.FFmpegError as error:
            raise broken(words(error)) from error


def check_frame_size(width: int, height: int, limits: VideoLimits) -> None:
    """Raise BadRequestError for a frame above the limit."""
    if width * height > limits.max_frame_pixels:
        raise BadRequestError(
            f"a video of {width}x{height} = {width * height} pixels a frame; the limit is {limits.max_frame_pixels} "
            "(setting --max-video-frame-pixels)",
            code="video_too_large",
        )


def broken(why: str) -> BadRequestError:
    """Return the error of a file that is damaged or incomplete."""
    return BadRequestError(f"the video is broken or cut off: {why}", code=INVALID_VIDEO)


def words(error: Exception) -> str:
    """Return the words of an FFmpeg error."""
    return getattr(error, "strerror", None) or plain_words(error)


def _format_of(data: bytes) -> str:
    if not data:
        raise BadRequestError("the video is empty (zero bytes)", code=INVALID_VIDEO)
    found = file_format(data)
    if found is not None and found.ffmpeg is not None:
        return found.ffmpeg
    if found is not None and found.kind == "picture":
        what = f"the data is {found.called}, not a video: send it in a part of type image_url, or image"
        raise BadRequestError(f"{what}; frames go as a list into a part of type video", code=INVALID_VIDEO)
    which = f"it is {found.called}" if found else f"it begins with {first_bytes(data)}"
    raise BadRequestError(
        f"the data is not a video of a supported format (MP4, MOV, WebM, Matroska, GIF); {which}", code=INVALID_VIDEO
    )


def _video_stream(container: InputContainer) -> VideoStream:
    """Return the first video stream that is not a cover."""
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if streams:
        return streams[0]
    cover = ", only a picture of its cover" if container.streams.video else ""
    raise BadRequestError(f"the video file has no video stream{cover}", code=INVALID_VIDEO)
