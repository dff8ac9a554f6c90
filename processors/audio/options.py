"""Limits of sounds, and how a checkpoint hears. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioKnobs:
    """How a request wants one sound processed: there is nothing to choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioLimits:
    """Server limits of sounds, also of those in clips.

    `max_duration_s`: seconds of the longest sound. `max_channels`: of a file. `max_tokens`: most pad tokens of one
    sound, None for no limit. `max_decode_s`: seconds to decode one sound.
    """

    max_duration_s: float = 3600.0
    max_channels: int = 16
    max_tokens: int | None = None
    max_decode_s: float = 60.0

    def check_duration(self, seconds: float) -> None:
        """Raise BadRequestError for a sound that is too long."""
        if seconds > self.max_duration_s:
            raise BadRequestError(
                f"the sound is {seconds:.1f} s long, or longer; the limit is {self.max_duration_s:g} s (setting "
                "--max-audio-duration-s)",
                code="audio_too_long",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioConfig:
    """A checkpoint's own preprocessing of sounds.

    `rate`: samples a second. `n_fft`, `hop`, `mels`: of the spectrum; a frame is `hop` samples. `longest_s`: what
    Qwen2.5-Omni pads to or cuts at, in seconds. `chunk_frames`: frames that go through the tower's convolutions
    together. `window_frames`: frames of a window of attention, if it is longer. `positions_per_s`: M-RoPE positions in
    a second of clip or sound. `seconds_per_chunk`: of clip and sound by turns (Qwen2.5-Omni).
    """

    rate: int
    n_fft: int
    hop: int
    mels: int
    longest_s: int
    chunk_frames: int
    window_frames: int
    positions_per_s: float
    seconds_per_chunk: float


def read_audio_config(raw: Mapping[str, Any], hf_config: Mapping[str, Any]) -> AudioConfig | None:
    """Read preprocessor_config.json and config.json; None for a model without ears. Raises KeyError, TypeError or
    ValueError for unusable values."""
    audio = (hf_config.get("vision_config") or {}).get("audio_config")
    if audio is None:
        return None
    chunk = 2 * int(audio["n_window"])
    found = AudioConfig(
        rate=int(raw.get("sampling_rate", 16000)),
        n_fft=int(raw.get("n_fft", 400)),
        hop=int(raw.get("hop_length", 160)),
        mels=int(raw.get("feature_size", 128)),
        longest_s=int(raw.get("chunk_length", 30)),
        chunk_frames=chunk,
        window_frames=int(audio.get("n_window_infer", chunk)),
        positions_per_s=float(hf_config.get("position_id_per_seconds", 25)),
        seconds_per_chunk=float(hf_config.get("seconds_per_chunk", 2)),
    )
    if found.mels != audio.get("num_mel_bins", found.mels):
        raise ValueError(f"feature_size is {found.mels} here but num_mel_bins {audio['num_mel_bins']} in config.json")
    if chunk < 2 or found.window_frames % chunk:
        raise ValueError(f"n_window_infer {found.window_frames} must be a multiple of 2 * n_window, {chunk}")
    return found
