"""Decodes a sound file, or the sound track of a clip, by PyAV: mono samples at the rate that a model hears."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from processors.audio.options import AudioLimits
from processors.formats import INVALID_AUDIO, file_format, first_bytes
from processors.formats import words as plain_words
from vlmserve_common.errors import BadRequestError

_RATES = range(1000, 768_001)
"""Sample rates that are read, in Hz. A second of 1 Hz would grow to 16,000 times its samples."""
_AT_ONCE = 16384
"""Samples of a channel that are checked and mixed at a time."""
_LARGEST = 65504.0  # of float samples, whose full scale is 1: squares stay far from overflowing


@dataclass(frozen=True, kw_only=True, slots=True)
class Sound:
    """A decoded sound. `samples`: float32 [n], mono, at the model's rate. `source_rate`, `channels`: of the file."""

    samples: np.ndarray
    source_rate: int
    channels: int


def decode_sound(data: bytes, rate: int, limits: AudioLimits) -> Sound:
    """Decode the first sound track of a file, and resample it to `rate`. Raises BadRequestError, also for a file that
    has none."""
    found = decode_track(data, _format_of(data), rate, limits)
    if found is None:
        raise BadRequestError("the file has no sound track", code=INVALID_AUDIO)
    return found


def decode_track(
    data: bytes, file_format: str, rate: int, limits: AudioLimits, *, start: float = 0.0, end: float | None = None
) -> Sound | None:
    """Decode the first sound track of a file of that FFmpeg format; None if it has none. Raises BadRequestError.

    Channels are averaged first, then resampled by libswresample. Memory holds the result and a few frames. `start`,
    `end`: the part to use, in seconds; None for all. A part behind the track's end is None, too.
    """
    try:
        with av.open(io.BytesIO(data), "r", format=file_format, metadata_errors="replace") as container:
            if not container.streams.audio:
                return None
            stream = container.streams.audio[0]
            if stream.codec_context is None:
                raise BadRequestError("the sound's codec is not supported", code=INVALID_AUDIO)
            if (seconds := _told_seconds(container, stream)) is not None:
                limits.check_duration(min(seconds, seconds if end is None else end) - start)
            frames = container.decode(stream)
            if (first := next(frames, None)) is None:
                raise _without_samples()
            _check_first(first, limits)
            samples = _samples(chain([first], frames), first, limits, start, end)
            parts = list(_resampled(samples, first.sample_rate, rate))
    except av.FFmpegError as error:
        why = getattr(error, "strerror", None) or plain_words(error)
        raise BadRequestError(f"the sound is broken or cut off: {why}", code=INVALID_AUDIO) from error
    if not parts:
        if start or end is not None:
            return None
        raise _without_samples()
    return Sound(samples=np.concatenate(parts), source_rate=first.sample_rate, channels=first.layout.nb_channels)


def _without_samples() -> BadRequestError:
    return BadRequestError("the sound track holds no samples", code=INVALID_AUDIO)


def _told_seconds(container: InputContainer, stream: AudioStream) -> float | None:
    """Return the header's seconds, if it has any."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / av.time_base


def _check_first(frame: AudioFrame, limits: AudioLimits) -> None:
    if frame.sample_rate not in _RATES:
        raise BadRequestError(
            f"the sound has {frame.sample_rate} samples a second; it must have {_RATES.start} to {_RATES.stop - 1} (no "
            "setting changes that)",
            code=INVALID_AUDIO,
        )
    if not 1 <= frame.layout.nb_channels <= limits.max_channels:
        raise BadRequestError(
            f"the sound has {frame.layout.nb_channels} channels; the limit is {limits.max_channels} (setting "
            "--max-audio-channels)",
            code="audio_too_costly",
        )


def _samples(
    frames: Iterator[AudioFrame], first: AudioFrame, limits: AudioLimits, start: float, end: float | None
) -> Iterator[np.ndarray]:
    """Yield mono samples float32 [n] from `start` to `end`, at the rate of the first frame: means of its channels."""
    count, rate, channels = 0, first.sample_rate, first.layout.nb_channels
    begin, stop = int(start * rate), sys.maxsize if end is None else int(end * rate)
    for one in _packed(frames, first, limits):
        values = one.to_ndarray().reshape(-1, channels)
        if not (np.abs(values) <= _LARGEST).all():  # false for NaN
            what = f"the sound has samples that are not finite, or beyond {_LARGEST:g}"
            raise BadRequestError(f"{what} (no setting changes that)", code=INVALID_AUDIO)
        used = values[max(begin - count, 0) : max(stop - count, 0)]
        count += len(values)
        limits.check_duration((min(count, stop) - begin) / rate)
        if len(used):
            yield used.T.copy().mean(0, dtype=np.float32)  # as mean(1), and three times as fast
        if count >= stop:
            return


def _packed(frames: Iterator[AudioFrame], first: AudioFrame, limits: AudioLimits) -> Iterator[AudioFrame]:
    """Yield packed floats, many at a time: each frame costs. Integers become -1 to 1."""
    to_float = AudioResampler(format="flt", frame_size=_AT_ONCE)  # packed: PyAV fails at 8 and more planes
    deadline, count, kind = time.monotonic() + limits.max_decode_s, 0, _kind(first)
    for frame in frames:
        if time.monotonic() > deadline:
            raise BadRequestError(
                f"decoding the sound takes longer than {limits.max_decode_s:g} s, the limit (setting "
                "--max-audio-decode-s)",
                code="audio_too_costly",
            )
        if _kind(frame) != kind:
            raise BadRequestError(
                f"the sound changes from {kind} to {_kind(frame)} after {count / first.sample_rate:.2f} s; it must "
                "stay the same",
                code=INVALID_AUDIO,
            )
        count += frame.samples
        yield from to_float.resample(frame)
    yield from to_float.resample(None)


def _kind(frame: AudioFrame) -> str:
    return f"{frame.sample_rate} Hz, {frame.layout.name}, {frame.format.name}"


def _resampled(parts: Iterator[np.ndarray], source_rate: int, rate: int) -> Iterator[np.ndarray]:
    if source_rate == rate:
        yield from parts
        return
    resampler = AudioResampler(format="flt", layout="mono", rate=rate)
    for samples in parts:
        frame = AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = source_rate
        yield from (one.to_ndarray()[0] for one in resampler.resample(frame))
    yield from (one.to_ndarray()[0] for one in resampler.resample(None))


def _format_of(data: bytes) -> str:
    if not data:
        raise BadRequestError("the sound is empty (zero bytes)", code=INVALID_AUDIO)
    found = file_format(data)
    if found is not None and found.kind in ("sound", "video") and found.ffmpeg is not None:
        return found.ffmpeg
    which = f"it is {found.called}" if found else f"it begins with {first_bytes(data)}"
    raise BadRequestError(
        "the data is not a sound of a supported format (WAV, FLAC, MP3, Ogg, AAC, M4A, MP4, MOV, WebM, Matroska); "
        f"{which}",
        code=INVALID_AUDIO,
    )
