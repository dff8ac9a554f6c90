"""The tensors of recurrent states, and what a step reads and writes in them.

A step that checks guesses must not change a state for good: some of its tokens may be wrong. It leaves the state
behind the last step's right tokens, and keeps what a later step needs to take it further (`GuessCache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from vlmserve.memory.recurrent_states import StateCopy
from vlmserve_common.compute.delta_rule import advance


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The shape of one request's state over all recurrent layers. conv: the last width - 1 inputs of the convolutions,
    [layers, width - 1, channels] in conv_dtype. recurrent: [layers, heads, key_dim, value_dim] in float32. hidden: size
    of the last token's hidden state, in conv_dtype, which an MTP head goes on from; 0 without one."""

    conv: tuple[int, int, int]
    recurrent: tuple[int, int, int, int]
    conv_dtype: torch.dtype
    hidden: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        conv, recurrent = torch.Size(self.conv).numel(), torch.Size(self.recurrent).numel()
        return conv * self.conv_dtype.itemsize + recurrent * torch.float32.itemsize + self._token_bytes

    def guess_bytes(self, tokens: int) -> int:
        """Return the bytes that a `GuessCache` keeps for a request with so many tokens in a step; 0 for none."""
        if not tokens:
            return 0
        (layers, width, channels), (_, heads, key_dim, value_dim) = self.conv, self.recurrent
        conv = (width + tokens) * channels * self.conv_dtype.itemsize
        return layers * (conv + tokens * heads * (key_dim + value_dim + 1) * 4) + tokens * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Bytes of a token's hidden state and position."""
        return self.hidden * self.conv_dtype.itemsize + self.axes * torch.int64.itemsize

    @property
    def axes(self) -> int:
        """Numbers of a kept position."""
        return 3 if self.hidden else 0


class RecurrentCache:
    """The states: first a blank one, with which requests begin, then `num_states` (see `RecurrentStates`). If `padded`,
    a last one, `padding_state`, is for requests that only fill a step up.

    conv [1 + num_states, layers, width - 1, channels]; recurrent [1 + num_states, layers, heads, key_dim, value_dim]. A
    state lies in one piece, so one copy moves it. hidden [1 + num_states, hidden], positions int64 [1 + num_states, 3]:
    of the last token, for an MTP head. guesses: if steps check guesses.
    """

    guesses: GuessCache | None = None

    def __init__(self, num_states: int, shape: StateShape, device: torch.device, *, padded: bool = False) -> None:
        self.num_states = num_states
        self.padding_state = 1 + num_states if padded else None
        count = 1 + num_states + padded
        self.conv = torch.zeros((count, *shape.conv), dtype=shape.conv_dtype, device=device)
        self.recurrent = torch.zeros((count, *shape.recurrent), dtype=torch.float32, device=device)
        self.hidden = torch.zeros((count, shape.hidden), dtype=shape.conv_dtype, device=device)
        self.positions = torch.zeros((count, shape.axes), dtype=torch.int64, device=device)

    def copy(self, jobs: Iterable[StateCopy]) -> None:
        """Do copies one after the other."""
        for job in jobs:
            for part in (self.conv, self.recurrent, self.hidden, self.positions):
                part[job.target].copy_(part[job.source])

    def advance(self, sources: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, targets: torch.Tensor) -> None:
        """Write states `sources`, behind the first `counts` tokens kept in `rows`, to `targets`, which are distinct;
        all int64 [n]. Sources are read before targets are written."""
        kept = self.guesses
        assert kept is not None, "guesses that were not kept"
        inputs = counts[:, None] + torch.arange(self.conv.shape[2], device=counts.device)
        self.conv[targets] = kept.conv[rows[:, None], :, inputs].transpose(1, 2)
        for layer in range(self.recurrent.shape[1]):
            states = self.recurrent[:, layer]
            keys, corrections, decay = (part[rows, layer] for part in (kept.keys, kept.corrections, kept.decay))
            states[targets] = advance(states[sources], keys, corrections, decay, counts)
        self.hidden[targets], self.positions[targets] = kept.hidden[rows, counts - 1], kept.positions[rows, counts - 1]


class GuessCache:
    """What the last step of each request made of its tokens, if some of them were guesses: see `delta_rule.advance`.

    It has a row for each place in the request pool, of up to `tokens` tokens. conv [rows, layers, width - 1 + tokens,
    channels]: inputs of the convolutions, those before the step first. keys [rows, layers, tokens, heads, key_dim],
    corrections [..., value_dim], decay [rows, layers, tokens, heads]: float32. hidden [rows, tokens, hidden], positions
    int64 [rows, tokens, 3]: see `RecurrentCache`.
    """

    def __init__(self, rows: int, tokens: int, shape: StateShape, device: torch.device) -> None:
        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((rows, *sizes), dtype=dtype, device=device)

        (layers, width, channels), (_, heads, key_dim, value_dim) = shape.conv, shape.recurrent
        self.conv = zeros(layers, width + tokens, channels, dtype=shape.conv_dtype)
        self.keys = zeros(layers, tokens, heads, key_dim)
        self.corrections = zeros(layers, tokens, heads, value_dim)
        self.decay = zeros(layers, tokens, heads)
        self.hidden = zeros(tokens, shape.hidden, dtype=shape.conv_dtype)
        self.positions = zeros(tokens, shape.axes, dtype=torch.int64)


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
class GuessedTokens:
    """Requests that have T tokens each, of which all but the first are guesses. tokens int64 [n, T]: of the batch.
    states int64 [n]: stay as they are. rows int64 [n]: of the `GuessCache`."""

    tokens: torch.Tensor
    states: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentStep:
    """A step's states, known on the host. spans: of requests with several tokens. guessed: of requests with guesses, by
    their number. single_tokens, single_states: int64 [n] on the device, of requests with one token; no tokens if the
    batch has only such requests."""

    cache: RecurrentCache
    spans: tuple[Span, ...]
    guessed: tuple[GuessedTokens, ...] = ()
    single_states: torch.Tensor | None = None
    single_tokens: torch.Tensor | None = None
