"""A gated delta net between its products, in Qwen3.5-9B's sizes: how long the device takes for it, and its bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from vlmserve.commands.bench.gpu.run import GpuRun
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep, Span, StateShape
from vlmserve.models.config import LinearAttentionConfig, ModelConfig
from vlmserve.models.delta_net import GatedDeltaNet
from vlmserve_common.compute.communicator import ALONE
from vlmserve_common.kernels import fused

_SIZES = LinearAttentionConfig(
    layers=frozenset({0}), num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4
)
_HIDDEN = 64
"""Its products are not measured, so they are small."""


class DeltaNet:
    """A net with random weights, and states for so many requests."""

    def __init__(self, run: GpuRun, requests: int) -> None:
        sizes, device, dtype = _SIZES, run.device, run.dtype
        fused.activate("auto", device)
        config = cast(ModelConfig, SimpleNamespace(hidden_size=_HIDDEN, rms_norm_eps=1e-6))
        self.net = GatedDeltaNet(config, ALONE, sizes, 0).to(device, dtype)
        for parameter in self.net.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        shape = StateShape(
            conv=(1, sizes.conv_width - 1, sizes.conv_size),
            recurrent=(1, sizes.num_value_heads, sizes.key_dim, sizes.value_dim),
            conv_dtype=dtype,
        )
        self.cache = RecurrentCache(requests, shape, device)
        self._device, self._dtype = device, dtype

    def decoding(self, requests: int) -> Callable[[int], torch.Tensor]:
        """Return what computes a token of each request."""
        states = torch.arange(1, requests + 1, device=self._device)
        return self._running(requests, RecurrentStep(cache=self.cache, spans=(), single_states=states))

    def reading(self, tokens: int) -> Callable[[int], torch.Tensor]:
        """Return what computes a prompt."""
        span = Span(start=0, length=tokens, prefix_len=0, state=1)
        return self._running(tokens, RecurrentStep(cache=self.cache, spans=(span,)))

    def _running(self, tokens: int, step: RecurrentStep) -> Callable[[int], torch.Tensor]:
        x = torch.randn(tokens, _HIDDEN, device=self._device).to(self._dtype)
        batch: Any = SimpleNamespace(recurrent=step)

        @torch.inference_mode()
        def compute(_: int) -> torch.Tensor:
            return cast(torch.Tensor, self.net(x, batch))

        return compute

    def bandwidth(self, requests: int, seconds: list[float]) -> float:
        """Return the bytes of states that decoding reads and writes in a second."""
        return 2.0 * requests * self.cache.recurrent[0].nbytes / statistics.median(seconds)
