"""The tensors of recurrent states, and what a step does with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from vlmserve.memory.recurrent_states import StateCopy


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """Of one request over all recurrent layers. conv: the last width - 1 inputs of the convolutions, [layers,
    width - 1, channels] in conv_dtype; recurrent: [layers, heads, key_dim, value_dim] in float32."""

    conv: tuple[int, int, int]
    recurrent: tuple[int, int, int, int]
    conv_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        conv, recurrent = torch.Size(self.conv).numel(), torch.Size(self.recurrent).numel()
        return conv * self.conv_dtype.itemsize + recurrent * torch.float32.itemsize


class RecurrentCache:
    """num_states states and, before them, the blank one that requests begin with; see `RecurrentStates`. padded: one
    more, behind them, that means nothing: `padding_state`, that of requests which only fill a step up.

    conv [1 + num_states, layers, width - 1, channels]; recurrent [1 + num_states, layers, heads, key_dim, value_dim]: a
    state lies in one piece, so that it is copied at once.
    """

    def __init__(self, num_states: int, shape: StateShape, device: torch.device, *, padded: bool = False) -> None:
        self.num_states = num_states
        self.padding_state = 1 + num_states if padded else None
        count = 1 + num_states + padded
        self.conv = torch.zeros((count, *shape.conv), dtype=shape.conv_dtype, device=device)
        self.recurrent = torch.zeros((count, *shape.recurrent), dtype=torch.float32, device=device)

    def copy(self, jobs: Iterable[StateCopy]) -> None:
        """Do these one after the other."""
        for job in jobs:
            self.conv[job.target].copy_(self.conv[job.source])
            self.recurrent[job.target].copy_(self.recurrent[job.source])


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens [start, start + length) of a batch, of one request, that go on from its state and leave it behind them.

    prefix_len: its tokens before. kept: tokens of the span, above 0 and below `length` -> where the state behind them
    is kept, too.
    """

    start: int
    length: int
    prefix_len: int
    state: int
    kept: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecurrentStep:
    """A step's states, known on the host. spans: of requests with several tokens. single_tokens, single_states: int64
    [n] on the device, those of requests with one token; no tokens if these are all of the batch."""

    cache: RecurrentCache
    spans: tuple[Span, ...]
    single_states: torch.Tensor | None = None
    single_tokens: torch.Tensor | None = None
