"""Log-mel features as transformers' `WhisperFeatureExtractor` makes them."""

from __future__ import annotations

import functools

import numpy as np
import torch

_AT_ONCE = 512
"""Frames that are transformed at a time. Each takes about 5 KB meanwhile, which stay in the core's cache."""


@functools.cache
def mel_filters(bins: int, mels: int, rate: int) -> np.ndarray:
    """Return Slaney's triangular filters float64 [bins, mels] from 0 Hz to half the rate, normalised by area.

    They are those of `mel_filter_bank` in transformers' audio_utils.
    """
    edges = _hertz(np.linspace(_mel(0.0), _mel(rate / 2), mels + 2))
    slopes = edges - np.linspace(0, rate // 2, bins)[:, None]
    rising, falling = -slopes[:, :-2] / np.diff(edges)[:-1], slopes[:, 2:] / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))


def _mel(hertz: float) -> float:
    return 15.0 + np.log(hertz / 1000) * 27.0 / np.log(6.4) if hertz >= 1000 else 3.0 * hertz / 200


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel >= 15.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mel - 15.0)), 200.0 * mel / 3.0)


def log_mel(samples: np.ndarray, frames: int, *, rate: int, n_fft: int, hop: int, out: np.ndarray) -> None:
    """Write the log-mel features of samples float32 [n] to the first frames of `out` float32 [frames or more, mels].

    Frame i is centred on sample i * hop, with ends that are mirrored. Power is at least 1e-10, and at least 1e-8 of
    the largest one of these frames.
    """
    framed = torch.from_numpy(np.pad(samples, n_fft // 2, mode="reflect")).unfold(0, n_fft, hop)
    filters = torch.from_numpy(mel_filters(n_fft // 2 + 1, out.shape[1], rate)).float()
    filters = filters.repeat_interleave(2, dim=0)  # for the squares of real and imaginary parts, side by side
    window, features = torch.hann_window(n_fft), torch.from_numpy(out)[:frames]
    for first in range(0, frames, _AT_ONCE):
        some = slice(first, min(frames, first + _AT_ONCE))
        squares = torch.view_as_real(torch.fft.rfft(framed[some] * window)).square_()
        torch.mm(squares.flatten(1), filters, out=features[some]).clamp_(min=1e-10).log10_()
    features.clamp_(min=float(features.max()) - 8.0).add_(4.0).div_(4.0)
