"""The towers for sounds of Qwen2.5-Omni and Qwen3-Omni.

Convolutions see a chunk of log-mel frames, attention a window of one or more chunks. So a sound is encoded window by
window: these are its temporal patches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from vision.towers.attention import segment_attention
from vision.towers.blocks import product_flops, product_rows
from vision.towers.grids import Segments
from vision.towers.pieces import Kind, Piece, PieceLimits, Steps, even_tiles, limited_tiles
from vision.towers.temporal_patch import TemporalPatch
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.convolution import Convolution
from vlmserve_common.compute.layers import LayerNorm
from vlmserve_common.compute.linear import Linear
from vlmserve_common.errors import CheckpointError

_EPS = 1e-5
_GELU = activation("gelu")
_FRAMES = 800
"""Frames that go through the convolutions together: their inner rows are wide."""


class AudioAttention(nn.Module):
    """Full attention inside each segment, without rotary positions."""

    def __init__(self, size: int, num_heads: int, *, key_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = Linear(size, size, bias=True)
        self.k_proj = Linear(size, size, bias=key_bias)
        self.v_proj = Linear(size, size, bias=True)
        self.out_proj = Linear(size, size, bias=True)
        self._out_flops = product_flops(self.out_proj)
        self._in_flops = product_flops(self) - self._out_flops

    def steps(self, x: torch.Tensor, norm: nn.Module, segments: Segments, limits: PieceLimits) -> Steps[None]:
        """Add attention over norm(x) to x [N, size]."""

        def project(rows: slice) -> torch.Tensor:
            normed = norm(x[rows])
            parts = normed.new_empty(len(normed), 3, normed.shape[1])
            for number, proj in enumerate((self.q_proj, self.k_proj, self.v_proj)):
                proj.write(normed, parts[:, number])
            return parts.unflatten(2, (self.num_heads, -1))

        def add(rows: slice) -> torch.Tensor:
            return self.out_proj(attended[rows].flatten(1), residual=x[rows])

        qkv = yield from product_rows(self, project, len(x), self._in_flops, limits)
        attended = yield from segment_attention(qkv, None, segments, limits)
        del qkv
        yield from product_rows(self.out_proj, add, len(x), self._out_flops, limits, out=x)


class AudioBlock(nn.Module):
    """Pre-norm transformer block with Whisper's names."""

    def __init__(self, size: int, num_heads: int, inner: int, act: str, *, key_bias: bool) -> None:
        super().__init__()
        self.self_attn = AudioAttention(size, num_heads, key_bias=key_bias)
        self.self_attn_layer_norm = LayerNorm(size, _EPS)
        self.fc1 = Linear(size, inner, bias=True)
        self.fc2 = Linear(inner, size, bias=True)
        self.final_layer_norm = LayerNorm(size, _EPS)
        self._act = activation(act)
        self.flops = product_flops(self)
        self._mlp_flops = product_flops(self.fc1) + product_flops(self.fc2)

    def steps(self, x: torch.Tensor, segments: Segments, limits: PieceLimits) -> Steps[None]:
        """Change x [N, size] to the block's output."""

        def add(rows: slice) -> torch.Tensor:
            return self.fc2(self.fc1(self.final_layer_norm(x[rows]), self._act), residual=x[rows])

        yield from self.self_attn.steps(x, self.self_attn_layer_norm, segments, limits)
        yield from product_rows(self, add, len(x), self._mlp_flops, limits, out=x)


class AudioTower(nn.Module, ABC):
    """A tower for sounds, with uninitialised weights, from an `audio_config`. Family classes add the layers before and
    behind the blocks.

    `chunk`: frames of a chunk.
    """

    key_bias: bool

    def __init__(self, audio_config: dict[str, Any]) -> None:
        super().__init__()
        fields = Fields(audio_config, "audio_config")
        self.size, heads = fields.positive("d_model"), fields.positive("encoder_attention_heads")
        if self.size % heads or self.size // heads % 4:
            raise CheckpointError(
                f"{fields.where}: d_model {self.size} over {heads} heads: a head's dimensions must be a multiple of 4"
            )
        self.mels = fields.positive("num_mel_bins", 128)
        self.out_size = fields.positive("output_dim")
        self.chunk = 2 * fields.positive("n_window")
        self.act = activation(fields.string("activation_function", "gelu"))
        inner, act = fields.positive("encoder_ffn_dim"), fields.string("activation_function", "gelu")
        self.layers = nn.ModuleList(
            AudioBlock(self.size, heads, inner, act, key_bias=self.key_bias)
            for _ in range(fields.positive("encoder_layers"))
        )
        self.ln_post = LayerNorm(self.size, _EPS)

    @abstractmethod
    def count(self, frames: int) -> int:
        """Return the rows of a chunk of so many frames behind the convolutions."""

    @abstractmethod
    def input_flops(self, frames: int) -> float:
        """Return the floating-point operations that turn a chunk of so many frames into rows."""

    @abstractmethod
    def convolve(self, frames: torch.Tensor) -> torch.Tensor:
        """Turn chunks [n, frames, mels] into rows [n, count, size], without positions."""

    @abstractmethod
    def project(self, x: torch.Tensor, lengths: Sequence[int], limits: PieceLimits) -> Steps[torch.Tensor]:
        """Turn the blocks' rows [N, size] of parts of these lengths into embeddings [rows, out_size]."""

    @abstractmethod
    def inner_rows(self, tokens: int) -> int | None:
        """Return how many of a part's rows its tokens are made of; None for all."""

    def steps(self, parts: Sequence[TemporalPatch], rows: Sequence[int], limits: PieceLimits) -> Steps[torch.Tensor]:
        """Encode parts of sounds in pieces: embeddings [sum of rows, out_size]. rows: of each part. The bits do not
        depend on the limits."""
        x, lengths = yield from self._embed(parts, rows, limits)
        segments = Segments(lengths, x.device)
        for block in self._blocks():
            yield from block.steps(x, segments, limits)
        return (yield from self.project(x, lengths, limits))

    def part_flops(self, frames: int) -> float:
        """Return the floating-point operations of the products for a part of so many frames."""
        row = sum(block.flops for block in self._blocks())
        lengths = [min(self.chunk, frames - first) for first in range(0, frames, self.chunk)]
        return sum(self.input_flops(length) + row * self.count(length) for length in lengths)

    @property
    def _is_packed(self) -> bool:
        return all(child.weight is None for child in self.modules() if isinstance(child, Linear))

    def _blocks(self) -> Iterator[AudioBlock]:
        return (block for block in self.layers if isinstance(block, AudioBlock))

    def _embed(
        self, parts: Sequence[TemporalPatch], rows: Sequence[int], limits: PieceLimits
    ) -> Steps[tuple[torch.Tensor, list[int]]]:
        """Return the blocks' input [N, size], and the rows of each part."""
        weight = self.ln_post.weight
        chunks = [
            (place, part.pixels[first : first + self.chunk])
            for place, part in enumerate(parts)
            for first in range(0, len(part.pixels), self.chunk)
        ]
        if any(chunk.shape[1:] != (self.mels,) for _, chunk in chunks):
            raise ValueError(f"a part of a sound has other than {self.mels} values a frame")
        made: list[list[torch.Tensor]] = [[] for _ in parts]
        done: dict[int, torch.Tensor] = {}
        for length in {len(chunk): None for _, chunk in chunks}:  # chunks at a sound's end are shorter
            places = [number for number, (_, chunk) in enumerate(chunks) if len(chunk) == length]
            table = self._positions(self.count(length)).to(weight.device, weight.dtype)
            flops, most = self.input_flops(length), max(1, _FRAMES // length)
            tiles: Iterable[slice] = even_tiles(len(places), most)  # torch's never change
            if self._is_packed:
                tiles = limited_tiles(len(places), flops, limits, Kind.PRODUCT, most=most, multiple=1)
            for tile in tiles:
                some = places[tile]
                frames = torch.from_numpy(np.stack([chunks[number][1] for number in some]))
                yield Piece(Kind.PRODUCT, flops * len(some))
                embedded = self.convolve(frames.to(weight.device, weight.dtype)) + table
                done |= dict(zip(some, embedded, strict=True))
        for number, (place, _) in enumerate(chunks):
            made[place].append(done[number])
        kept = [torch.cat(own)[: self.inner_rows(count)] for own, count in zip(made, rows, strict=True)]
        return torch.cat(kept), [len(own) for own in kept]

    def _positions(self, count: int) -> torch.Tensor:
        """Return Whisper's sinusoids float32 [count, size]."""
        half = self.size // 2
        scales = torch.exp(-np.log(10000) / (half - 1) * torch.arange(half).float())
        times = torch.arange(count)[:, None] * scales
        return torch.cat((times.sin(), times.cos()), dim=1)


class Qwen2_5AudioTower(AudioTower):
    """Qwen2.5-Omni's: two convolutions over time, and pairs of rows averaged at the end."""

    key_bias = False

    def __init__(self, audio_config: dict[str, Any]) -> None:
        super().__init__(audio_config)
        self.conv1 = Convolution(self.mels, self.size, dims=1)
        self.conv2 = Convolution(self.size, self.size, dims=1, stride=2)
        self.proj = Linear(self.size, self.out_size, bias=True)
        self._out_flops = product_flops(self.proj)
        self.requires_grad_(False)

    def count(self, frames: int) -> int:
        """See `AudioTower`."""
        return self.conv2.size(frames)

    def input_flops(self, frames: int) -> float:
        """See `AudioTower`."""
        return self.conv1.flops * frames + self.conv2.flops * self.count(frames)

    def convolve(self, frames: torch.Tensor) -> torch.Tensor:
        """See `AudioTower`."""
        return self.conv2(self.conv1(frames, _GELU), _GELU)

    def inner_rows(self, tokens: int) -> int | None:
        """See `AudioTower`."""
        return None

    def project(self, x: torch.Tensor, lengths: Sequence[int], limits: PieceLimits) -> Steps[torch.Tensor]:
        """See `AudioTower`. An odd last row is dropped."""
        pairs = torch.cat([own[: len(own) // 2 * 2].unflatten(0, (-1, 2)) for own in x.split(list(lengths))])

        def compute(rows: slice) -> torch.Tensor:
            return self.proj(self.ln_post((pairs[rows, 0] + pairs[rows, 1]) / 2))

        return (yield from product_rows(self.proj, compute, len(pairs), self._out_flops, limits))


class Qwen3AudioTower(AudioTower):
    """Qwen3-Omni's: three convolutions over time and pitch."""

    key_bias = True

    def __init__(self, audio_config: dict[str, Any]) -> None:
        super().__init__(audio_config)
        channels = Fields(audio_config, "audio_config").positive("downsample_hidden_size")
        self.conv2d1 = Convolution(1, channels, dims=2, stride=2)
        self.conv2d2 = Convolution(channels, channels, dims=2, stride=2)
        self.conv2d3 = Convolution(channels, channels, dims=2, stride=2)
        self.conv_out = Linear(channels * self.count(self.mels), self.size, bias=False)
        self.proj1 = Linear(self.size, self.size, bias=True)
        self.proj2 = Linear(self.size, self.out_size, bias=True)
        self._out_flops = product_flops(self.proj1) + product_flops(self.proj2)
        self._in_flops = product_flops(self.conv_out)
        self.requires_grad_(False)

    def count(self, frames: int) -> int:
        """See `AudioTower`."""
        for conv in self._convolutions:
            frames = conv.size(frames)
        return frames

    @property
    def _convolutions(self) -> tuple[Convolution, ...]:
        return self.conv2d1, self.conv2d2, self.conv2d3

    def input_flops(self, frames: int) -> float:
        """See `AudioTower`."""
        total, space = self._in_flops * self.count(frames), (self.mels, frames)
        for conv in self._convolutions:
            space = conv.size(space[0]), conv.size(space[1])
            total += conv.flops * space[0] * space[1]
        return total

    def convolve(self, frames: torch.Tensor) -> torch.Tensor:
        """See `AudioTower`."""
        x = frames.transpose(1, 2)[..., None]
        for conv in self._convolutions:
            x = conv(x, _GELU)
        rows = x.permute(0, 2, 3, 1).flatten(2)  # [n, count, channels * pitches]
        return self.conv_out(rows.flatten(0, 1).contiguous()).view(*rows.shape[:2], -1)

    def inner_rows(self, tokens: int) -> int | None:
        """See `AudioTower`. The last chunk may have been filled up."""
        return tokens

    def project(self, x: torch.Tensor, lengths: Sequence[int], limits: PieceLimits) -> Steps[torch.Tensor]:
        """See `AudioTower`."""

        def compute(rows: slice) -> torch.Tensor:
            return self.proj2(self.proj1(self.ln_post(x[rows]), self.act))

        return (yield from product_rows(self.proj2, compute, len(x), self._out_flops, limits))
