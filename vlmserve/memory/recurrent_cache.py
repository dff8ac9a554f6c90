"""The tensors of recurrent states, and what a step reads and writes in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from vlmserve.memory.recurrent_states import StateCopy


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The shape of one request's state over all recurrent layers. conv: the last width - 1 inputs of the convolutions,
    [layers, width - 1, channels] in conv_dtype. recurrent: [layers, heads, key_dim, value_dim] in float32."""

    conv: tuple[int, int, int]
    recurrent: tuple[int, int, int, int]
    conv_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        conv, recurrent = torch.Size(self.conv).numel(), torch.Size(self.recurrent).numel()
        return conv * self.conv_dtype.itemsize + recurrent * torch.float32.itemsize


class RecurrentCache:
    """The states: first a blank one, with which requests begin, then `num_states` (see `RecurrentStates`). If `padded`,
    a last one, `padding_state`, is for requests that only fill a step up.

    conv [1 + num_states, layers, width - 1, channels]; recurrent [1 + num_states, layers, heads, key_dim, value_dim]. A
    state lies in one piece, so one copy moves it.
    """

    def __init__(self, num_states: int, shape: StateShape, device: torch.device, *, padded: bool = False) -> None:
        self.num_states = num_states
        self.padding_state = 1 + num_states if padded else None
        count = 1 + num_states + padded
        self.conv = torch.zeros((count, *shape.conv), dtype=shape.conv_dtype, device=device)
        self.recurrent = torch.zeros((count, *shape.recurrent), dtype=torch.float32, device=device)

    def copy(self, jobs: Iterable[StateCopy]) -> None:
        """Do copies one after the other."""
        for job in jobs:
            self.conv[job.target].copy_(self.conv[job.source])
            self.recurrent[job.target].copy_(self.recurrent[job.source])


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens [start, start + length) of a batch, of one request. They go on from its state and leave the new state
    there.

    prefix_len: its tokens before. kept: tokens of the span, above 0 and below `length` -> the state that is to keep a
    copy of the state behind them.
    """

    start: int
    length: int
    prefix_len: int
    state: int
    kept: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecurrentStep:
    """A step's states, known on the host. spans: of requests with several tokens. single_tokens, single_states: int64
    [n] on the device, of requests with one token; no tokens if the batch has only such requests."""

    cache: RecurrentCache
    spans: tuple[Span, ...]
    single_states: torch.Tensor | None = None
    single_tokens: torch.Tensor | None = None
