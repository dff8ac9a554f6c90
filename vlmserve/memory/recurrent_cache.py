"""The tensors of recurrent states, and what a step reads and writes in them.

A step that checks guesses must not change a state for good: some of its tokens may be wrong. It leaves the state
behind the last step's right tokens, and keeps what a later step needs to take it further (`GuessCache`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from vlmserve.memory.recurrent_states import StateCopy
from vlmserve_common.compute.delta_rule import CHUNK, ChunkTable, KeptGuesses, advance
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.kernels import fused


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The shape of one request's state over all recurrent layers. conv: the last width - 1 inputs of the convolutions,
    [layers, width - 1, channels] in conv_dtype. recurrent: [layers, heads, key_dim, value_dim] in float32. hidden: size
    of what the model hands on for the last token, in conv_dtype, which an MTP head goes on from; 0 without one.

    ngram_conv: the last inputs of the convolutions over n-gram embeddings, [layers, inputs, channels] in conv_dtype.
    ngram_ids: how many of the last token ids n-grams need, kept as numbers that are 0 before a text.
    """

    conv: tuple[int, int, int]
    recurrent: tuple[int, int, int, int]
    conv_dtype: torch.dtype
    hidden: int = 0
    ngram_conv: tuple[int, int, int] = (0, 0, 0)
    ngram_ids: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        conv, recurrent = torch.Size(self.conv).numel(), torch.Size(self.recurrent).numel()
        conv += torch.Size(self.ngram_conv).numel()
        kept = self._token_bytes + self.ngram_ids * torch.int64.itemsize
        return conv * self.conv_dtype.itemsize + recurrent * torch.float32.itemsize + kept

    def guess_bytes(self, tokens: int) -> int:
        """Return the bytes that a `GuessCache` keeps for a request with so many tokens in a step; 0 for none."""
        if not tokens:
            return 0
        (layers, width, channels), (_, heads, key_dim, value_dim) = self.conv, self.recurrent
        conv = (width + tokens) * channels * self.conv_dtype.itemsize
        ngram_layers, inputs, size = self.ngram_conv
        ngrams = ngram_layers * (inputs + tokens) * size * self.conv_dtype.itemsize
        ngrams += (self.ngram_ids + tokens) * torch.int64.itemsize if self.ngram_ids else 0
        return layers * (conv + tokens * heads * (key_dim + value_dim + 1) * 4) + tokens * self._token_bytes + ngrams

    @property
    def _token_bytes(self) -> int:
        """Bytes of what an MTP head goes on from: of a token, and its position."""
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
    of the last token, for an MTP head. ngram_conv [1 + num_states, layers, inputs, channels], ngram_ids int64 [1 +
    num_states, ids]: see `StateShape`. guesses: if steps check guesses.
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
        self.ngram_conv = torch.zeros((count, *shape.ngram_conv), dtype=shape.conv_dtype, device=device)
        self.ngram_ids = torch.zeros((count, shape.ngram_ids), dtype=torch.int64, device=device)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Everything that states consist of, [1 + num_states, ...] each."""
        return self.conv, self.recurrent, self.hidden, self.positions, self.ngram_conv, self.ngram_ids

    def copy(self, jobs: Iterable[StateCopy]) -> None:
        """Do copies one after the other."""
        for job in jobs:
            for part in self.parts:
                part[job.target].copy_(part[job.source])

    def advance(self, sources: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, targets: torch.Tensor) -> None:
        """Write states `sources`, behind the first `counts` tokens kept in `rows`, to `targets`, which are distinct;
        all int64 [n]. Sources are read before targets are written: a target is its own source or none."""
        kept = self.guesses
        assert kept is not None, "guesses that were not kept"

        def last(inputs: int) -> torch.Tensor:
            return counts[:, None] + torch.arange(inputs, device=counts.device)

        for own, given in ((self.conv, kept.conv), (self.ngram_conv, kept.ngram_conv)):
            own[targets] = given[rows[:, None], :, last(own.shape[2])].transpose(1, 2)
        self.ngram_ids[targets] = kept.ngram_ids[rows[:, None], last(self.ngram_ids.shape[1])]
        if fused.runs_delta_nets(self.conv, *self.recurrent.shape[-2:]):
            from vlmserve_common.kernels.gpu import delta_rule  # not where there is no GPU

            guesses = KeptGuesses(keys=kept.keys, corrections=kept.corrections, decay=kept.decay, rows=rows)
            delta_rule.advance(self.recurrent, guesses, sources, counts, targets)
        else:
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
    int64 [rows, tokens, 3]: see `RecurrentCache`. ngram_conv [rows, layers, inputs + tokens, channels], ngram_ids int64
    [rows, ids + tokens]: as conv.
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
        ngram_layers, inputs, size = shape.ngram_conv
        self.ngram_conv = zeros(ngram_layers, inputs + tokens, size, dtype=shape.conv_dtype)
        self.ngram_ids = zeros(shape.ngram_ids + tokens if shape.ngram_ids else 0, dtype=torch.int64)


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

    @property
    def ends(self) -> dict[int, int]:
        """Tokens of the span -> the state that is left behind them; its own last."""
        return {**self.kept, self.length: self.state}

    def runs(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield tokens [first, last) that are computed together: up to `most`, a multiple of `CHUNK`. All but the first
        begin at a multiple of `CHUNK` of the request's tokens, or where a state is kept. So a prompt that is cut at
        such multiples gives the same result."""
        aligned = range(-self.prefix_len % CHUNK or most, self.length, most)
        return itertools.pairwise(sorted({0, *aligned, *self.ends}))


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

    @cached_property
    def chunks(self) -> ChunkTable:
        """The chunks of the spans."""
        chunks: list[tuple[int, int, int, int, int]] = []
        starts = [0]
        for span in self.spans:
            start, ends = span.start, span.ends
            chunks += [
                (start + first, start + last, start, span.state, ends.get(last, -1)) for first, last in span.runs(CHUNK)
            ]
            starts.append(len(chunks))
        device = self.cache.recurrent.device
        made = (torch.tensor(part, dtype=torch.int32) for part in (chunks, starts))
        on_device = [to_device(part, device) for part in made]
        return ChunkTable(chunks=on_device[0], starts=on_device[1])

    def slide(
        self, kept: torch.Tensor, guesses: torch.Tensor | None, x: torch.Tensor
    ) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
        """Go over the requests, some at a time: yield the places of T tokens in the batch, and what there is of x for
        them, behind the last W of the tokens before, [..., W + T, *]. States then keep the last W behind the step.

        kept [1 + num_states, W, *], guesses [rows, W + tokens, *]: of the cache. x [N, *].
        """
        width = kept.shape[1]
        for span in self.spans:
            tokens = slice(span.start, span.start + span.length)
            every = torch.cat((kept[span.state], x[tokens]))
            yield tokens, every
            for end, state in span.ends.items():
                kept[state] = every[end : end + width]
        for guessed in self.guessed:
            every = torch.cat((kept[guessed.states], x[guessed.tokens]), dim=1)
            yield guessed.tokens, every
            assert guesses is not None, "no room for guesses"
            guesses[guessed.rows, : every.shape[1]] = every
        if self.single_states is not None:
            singles = torch.arange(len(x), device=x.device) if self.single_tokens is None else self.single_tokens
            every = torch.cat((kept[self.single_states], x[singles, None]), dim=1)
            yield singles[:, None], every
            kept[self.single_states] = every[:, 1:]
