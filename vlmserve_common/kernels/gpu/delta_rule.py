"""The gated delta rule of `compute.delta_rule` in kernels, between the convolution and the gated norm of a net.

Prompts are computed a chunk at a time, by two kernels. The first takes all chunks at once: it inverts the triangular
system of what a chunk's tokens correct in each other. The second goes over the chunks of each span with the state, and
only multiplies. One more kernel goes over single tokens, for requests that decode and for guesses. The last one takes
states behind the guesses that were right.

States and sums are in float32. The tensor cores multiply. In 16-bit models they round states to 11 bits first (tf32).
In the inverse, whose errors would spread, and in float32 models, a product is made of three such ones, which is nearly
as good as float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vlmserve_common.compute.delta_rule import CHUNK, ChunkTable, KeptGuesses
from vlmserve_common.kernels.delta_step import DeltaWeights
from vlmserve_common.kernels.gpu.common import INTERPRETED, rounded
from vlmserve_common.kernels.gpu.decode import padded

_EPS = tl.constexpr(1e-6)
_PRECISE = "tf32x3"
"""The precision of products that must be nearly as good as in float32: three of the tensor cores each."""
_TWO_CHUNKS = 200 << 10
"""Bytes of shared memory."""
_COLUMNS = 32
"""Elements of a head that are multiplied at a time where no state is held."""
_VALUES = 32
"""Values of a head that a program has the state of: heads are cut, so that a few requests occupy the GPU."""


@dataclass(frozen=True, kw_only=True)
class NetStep:
    """A step of one net. mixed [N, channels]: behind the convolution, contiguous; queries, keys and values. b, a [N,
    value_heads]: rows lie apart by one stride. recurrent float32 [states, value_heads, key_dim, value_dim]: states lie
    apart by any stride. out [N, value_heads, value_dim], contiguous: rows of other tokens are not written. mixed, b, a,
    out and weights are of one dtype."""

    mixed: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    weights: DeltaWeights
    recurrent: torch.Tensor
    out: torch.Tensor

    @property
    def heads(self) -> dict[str, int]:
        """The constants of all kernels."""
        weights = self.weights
        return {
            "KEY_HEADS": weights.key_heads,
            "HEADS": weights.value_heads,
            "KEY": weights.key_dim,
            "VALUE": weights.value_dim,
        }

    @property
    def rates(self) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor]:
        """What decays and rates come from."""
        assert self.b.stride() == self.a.stride()
        return self.b, self.a, self.b.stride(0), self.weights.a_log, self.weights.dt_bias


@functools.cache
def _holds_two_chunks(device: torch.device) -> bool:
    """Whether a block has shared memory for the next chunk's tiles beside those of one: on data centres' GPUs from
    compute capability 9.0 on."""
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= _TWO_CHUNKS


def run_chunks(net: NetStep, table: ChunkTable) -> None:
    """Compute the tokens of a table's spans, and leave states where they are to be kept."""
    weights, count = net.weights, len(net.mixed)
    heads = weights.value_heads
    products = _PRECISE if net.mixed.dtype == torch.float32 else "tf32"
    values, known, inside, decay = (
        torch.empty(count, heads, *size, dtype=torch.float32, device=net.mixed.device)
        for size in ((weights.value_dim,), (weights.key_dim,), (CHUNK,), ())
    )
    prepare_kernel[len(table.chunks), heads](
        net.mixed,
        *net.rates,
        table.chunks,
        values,
        known,
        inside,
        decay,
        **net.heads,
        BLOCK=min(_COLUMNS, padded(max(weights.key_dim, weights.value_dim))),
        ROWS=CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        PRECISE=_PRECISE,
        PRODUCTS=products,
        WIDEN=INTERPRETED and net.mixed.dtype == torch.bfloat16,
        num_warps=4,
    )
    size = min(_VALUES, padded(weights.value_dim))
    follow_kernel[len(table.starts) - 1, heads, triton.cdiv(weights.value_dim, size)](
        net.mixed,
        table.chunks,
        table.starts,
        values,
        known,
        inside,
        decay,
        net.recurrent,
        net.recurrent.stride(0),
        net.out,
        **net.heads,
        BLOCK_KEY=padded(weights.key_dim),
        BLOCK_VALUE=size,
        ROWS=CHUNK,
        PRODUCTS=products,
        num_warps=4,
        num_stages=2 if products != _PRECISE and _holds_two_chunks(net.mixed.device) else 1,
    )


def run_few(
    net: NetStep, states: torch.Tensor, tokens: torch.Tensor | None = None, kept: KeptGuesses | None = None
) -> None:
    """Compute T tokens of each of n requests, one after the other.

    states: int64 [n], those of the requests. tokens: int64 [n, T]; None for the first n, one each. kept: what a later
    step needs to go on behind some of the tokens; states stay as they are, then. Without it they are written.
    """
    weights = net.weights
    size = min(_VALUES, padded(weights.value_dim))
    guesses = (
        (None, 0, None, 0, None, 0, None)
        if kept is None
        else (
            kept.keys,
            kept.keys.stride(0),
            kept.corrections,
            kept.corrections.stride(0),
            kept.decay,
            kept.decay.stride(0),
            kept.rows.contiguous(),
        )
    )
    few_kernel[len(states), weights.value_heads, triton.cdiv(weights.value_dim, size)](
        net.mixed,
        *net.rates,
        states.contiguous(),
        None if tokens is None else tokens.contiguous(),
        1 if tokens is None else tokens.shape[1],
        *guesses,
        net.recurrent,
        net.recurrent.stride(0),
        net.out,
        **net.heads,
        BLOCK_KEY=padded(weights.key_dim),
        BLOCK_VALUE=size,
        num_warps=4,
    )


def advance(
    recurrent: torch.Tensor,
    kept: KeptGuesses,
    sources: torch.Tensor,
    counts: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Write states `sources`, behind the first `counts` tokens kept, to `targets`, which are distinct: int64 [n]. A
    state that is source and target is written last; no other target is a source.

    recurrent float32 [states, layers, heads, key_dim, value_dim], kept: of all layers, contiguous.
    """
    _, layers, heads, key_dim, value_dim = recurrent.shape
    rows, sources, counts, targets = (part.contiguous() for part in (kept.rows, sources, counts, targets))
    size = min(_VALUES, padded(value_dim))
    advance_kernel[layers * heads, triton.cdiv(value_dim, size)](
        recurrent,
        kept.keys,
        kept.corrections,
        kept.decay,
        rows,
        sources,
        counts,
        targets,
        len(sources),
        kept.keys.shape[2],
        LAYERS=layers,
        HEADS=heads,
        KEY=key_dim,
        VALUE=value_dim,
        BLOCK_KEY=padded(key_dim),
        BLOCK_VALUE=size,
        num_warps=4,
    )


@triton.jit
def _rates(
    b: tl.tensor, a: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Decays and rates float32 of tokens whose b and a are of `dtype`."""
    rate = rounded(1.0 / (1.0 + tl.exp(-b.to(tl.float32))), dtype).to(tl.float32)
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    small = tl.exp(tl.minimum(x, 20.0))
    # log(1 + small), also where the sum is rounded
    more = 1.0 + small
    softplus = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return -tl.exp(a_log.to(tl.float32)) * tl.where(x > 20.0, x, softplus), rate


@triton.jit
def _inverse(system: tl.tensor, ROWS: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """The inverse of 1 + a matrix [ROWS, ROWS], of 2 to the LEVELS rows, that is 0 on and above its diagonal.

    Blocks on the diagonal are inverted in pairs, of 1, 2, 4 ... rows: of two inverses P and Q and the block R below the
    first, the pair's is P, -Q R P and Q.
    """
    i = tl.arange(0, ROWS)
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    for level in range(LEVELS):  # not unrolled, for else the masks of all levels would fill the registers
        row, column = i[:, None] >> level, i[None, :] >> level
        below = tl.where((row // 2 == column // 2) & (row > column), system, 0.0)
        product = tl.dot(inverse, below, input_precision=PRECISION)
        inverse -= tl.dot(product, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _squares(x: tl.tensor) -> tl.tensor:
    """The sums of squares of rows."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def prepare_kernel(
    mixed: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    rates_stride: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    chunks: tl.tensor,
    values: tl.tensor,
    known: tl.tensor,
    inside: tl.tensor,
    decay: tl.tensor,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISE: tl.constexpr,
    PRODUCTS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A head of a chunk a program: see `compute.delta_rule._Chunks` for what it leaves."""
    begin = tl.load(chunks + 5 * tl.program_id(0))
    end = tl.load(chunks + 5 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    i = tl.arange(0, ROWS)
    here = begin + i < end
    token = (begin + i).to(tl.int64)
    g, rate = _rates(
        tl.load(b + token * rates_stride + head, mask=here, other=0.0),
        tl.load(a + token * rates_stride + head, mask=here, other=0.0),
        tl.load(a_log + head),
        tl.load(dt_bias + head),
        b.dtype.element_ty,
    )
    rate = tl.where(here, rate, 0.0)
    total = tl.cumsum(tl.where(here, g, 0.0), 0)
    tl.store(decay + token * HEADS + head, total, mask=here)
    between = tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], -float("inf")))

    own = mixed + (token * (2 * KEY_HEADS * KEY + HEADS * VALUE))[:, None]
    keys = own + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY
    e = tl.arange(0, BLOCK)[None, :]
    scores = tl.zeros([ROWS, ROWS], tl.float32)
    system = tl.zeros([ROWS, ROWS], tl.float32)
    lengths = tl.zeros([ROWS], tl.float32)
    asked = tl.zeros([ROWS], tl.float32)
    for start in range(0, KEY, BLOCK):
        there = here[:, None] & (start + e < KEY)
        k = tl.load(keys + start + e, mask=there, other=0.0)
        q = tl.load(keys - KEY_HEADS * KEY + start + e, mask=there, other=0.0)
        if WIDEN:
            k, q = k.to(tl.float32), q.to(tl.float32)
        lengths += _squares(k)
        asked += _squares(q)
        system = tl.dot(k, tl.trans(k), system, input_precision=PRECISE)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISE)
    unit = tl.rsqrt(lengths + _EPS)
    scores *= (tl.rsqrt(asked + _EPS) * (KEY**-0.5))[:, None] * unit[None, :] * between
    tl.store(inside + ((token * HEADS + head) * ROWS)[:, None] + i[None, :], scores, mask=here[:, None])
    system *= (unit * rate)[:, None] * unit[None, :] * between
    inverse = _inverse(tl.where(i[:, None] > i[None, :], system, 0.0), ROWS, LEVELS, PRECISE)

    known += ((token * HEADS + head) * KEY)[:, None]
    for start in range(0, KEY, BLOCK):
        there = here[:, None] & (start + e < KEY)
        right = tl.load(keys + start + e, mask=there, other=0.0).to(tl.float32)
        right *= (unit * rate * tl.exp(total))[:, None]
        tl.store(known + start + e, tl.dot(inverse, right, input_precision=PRODUCTS), mask=there)
    own += 2 * KEY_HEADS * KEY + head * VALUE
    values += ((token * HEADS + head) * VALUE)[:, None]
    for start in range(0, VALUE, BLOCK):
        there = here[:, None] & (start + e < VALUE)
        right = tl.load(own + start + e, mask=there, other=0.0).to(tl.float32) * rate[:, None]
        tl.store(values + start + e, tl.dot(inverse, right, input_precision=PRODUCTS), mask=there)


@triton.jit
def follow_kernel(
    mixed: tl.tensor,
    chunks: tl.tensor,
    starts: tl.tensor,
    values: tl.tensor,
    known: tl.tensor,
    inside: tl.tensor,
    decay: tl.tensor,
    recurrent: tl.tensor,
    state_stride: tl.tensor,
    out: tl.tensor,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> None:
    """Some values of a head of a span a program, chunk after chunk."""
    head = tl.program_id(1)
    first = tl.load(starts + tl.program_id(0))
    i, e = tl.arange(0, ROWS), tl.arange(0, BLOCK_KEY)
    f = tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    of_state = (e < KEY)[:, None] & (f < VALUE)[None, :]
    states = recurrent + head * KEY * VALUE + e[:, None] * VALUE + f[None, :]
    state = tl.load(states + tl.load(chunks + 5 * first + 3).to(tl.int64) * state_stride, mask=of_state, other=0.0)
    tl.debug_barrier()  # the last chunk writes to it
    for number in range(first, tl.load(starts + tl.program_id(0) + 1)):
        begin = tl.load(chunks + 5 * number)
        end = tl.load(chunks + 5 * number + 1)
        target = tl.load(chunks + 5 * number + 4)
        here = begin + i < end
        token = (begin + i).to(tl.int64)
        row = (token * HEADS + head)[:, None]
        of_keys = here[:, None] & (e < KEY)[None, :]
        of_values = here[:, None] & (f < VALUE)[None, :]
        total = tl.load(decay + token * HEADS + head, mask=here, other=0.0)
        last = tl.load(decay + (end - 1).to(tl.int64) * HEADS + head)

        new = tl.load(values + row * VALUE + f[None, :], mask=of_values, other=0.0)
        new -= tl.dot(tl.load(known + row * KEY + e[None, :], mask=of_keys, other=0.0), state, input_precision=PRODUCTS)
        keys = mixed + (token * (2 * KEY_HEADS * KEY + HEADS * VALUE))[:, None]
        keys += (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + e[None, :]
        q = tl.load(keys - KEY_HEADS * KEY, mask=of_keys, other=0.0).to(tl.float32)
        asking = q * (tl.rsqrt(_squares(q) + _EPS) * (KEY**-0.5) * tl.exp(total))[:, None]
        made = tl.dot(asking, state, input_precision=PRODUCTS)
        seen = tl.load(inside + row * ROWS + i[None, :], mask=here[:, None], other=0.0)
        made = tl.dot(seen, new, made, input_precision=PRODUCTS)
        tl.store(out + row * VALUE + f[None, :], rounded(made, out.dtype.element_ty), mask=of_values)

        k = tl.load(keys, mask=of_keys, other=0.0).to(tl.float32)
        writing = k * (tl.rsqrt(_squares(k) + _EPS) * tl.exp(last - total))[:, None]
        state = tl.dot(tl.trans(writing), new, state * tl.exp(last), input_precision=PRODUCTS)
        if target >= 0:
            tl.store(states + target.to(tl.int64) * state_stride, state, mask=of_state)


@triton.jit(do_not_specialize=["length"])
def few_kernel(
    mixed: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    rates_stride: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    length: tl.tensor,
    kept_keys: tl.tensor,
    keys_stride: tl.tensor,
    kept_corrections: tl.tensor,
    corrections_stride: tl.tensor,
    kept_decay: tl.tensor,
    decay_stride: tl.tensor,
    places: tl.tensor,
    recurrent: tl.tensor,
    state_stride: tl.tensor,
    out: tl.tensor,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """Some values of a head of a request a program, token after token."""
    request, head = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, BLOCK_KEY)
    f = tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    of_keys, of_values = e < KEY, f < VALUE
    of_state = of_keys[:, None] & of_values[None, :]
    states = recurrent + head * KEY * VALUE + e[:, None] * VALUE + f[None, :]
    states += tl.load(rows + request) * state_stride
    state = tl.load(states, mask=of_state, other=0.0)
    tl.debug_barrier()  # it is written in the same place
    total = 0.0
    for place in range(length):
        if tokens is None:
            token = request.to(tl.int64)
        else:
            token = tl.load(tokens + request * length + place)
        at = token * rates_stride + head
        g, rate = _rates(
            tl.load(b + at), tl.load(a + at), tl.load(a_log + head), tl.load(dt_bias + head), b.dtype.element_ty
        )
        own = mixed + token * (2 * KEY_HEADS * KEY + HEADS * VALUE)
        keys = own + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + e
        q = tl.load(keys - KEY_HEADS * KEY, mask=of_keys, other=0.0).to(tl.float32)
        k = tl.load(keys, mask=of_keys, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + _EPS) * (KEY**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + _EPS)
        v = tl.load(own + 2 * KEY_HEADS * KEY + head * VALUE + f, mask=of_values, other=0.0).to(tl.float32)
        state *= tl.exp(g)
        correction = (v - tl.sum(state * k[:, None], 0)) * rate
        state += k[:, None] * correction[None, :]
        made = tl.sum(state * q[:, None], 0)
        tl.store(out + (token * HEADS + head) * VALUE + f, rounded(made, out.dtype.element_ty), mask=of_values)
        if kept_keys is not None:
            total += g
            to = tl.load(places + request)
            slot = place * HEADS + head
            tl.store(kept_corrections + to * corrections_stride + slot * VALUE + f, correction, mask=of_values)
            if tl.program_id(2) == 0:
                tl.store(kept_keys + to * keys_stride + slot * KEY + e, k, mask=of_keys)
                tl.store(kept_decay + to * decay_stride + slot, total)
    if kept_keys is None:
        tl.store(states, state, mask=of_state)


@triton.jit(do_not_specialize=["count"])
def advance_kernel(
    recurrent: tl.tensor,
    kept_keys: tl.tensor,
    kept_corrections: tl.tensor,
    kept_decay: tl.tensor,
    rows: tl.tensor,
    sources: tl.tensor,
    counts: tl.tensor,
    targets: tl.tensor,
    count: tl.tensor,
    most: tl.tensor,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """Some values of a head of a layer a program, state after state."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    e = tl.arange(0, BLOCK_KEY)
    f = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    of_keys, of_values = e < KEY, f < VALUE
    of_state = of_keys[:, None] & of_values[None, :]
    states = recurrent + (layer * HEADS + head) * KEY * VALUE + e[:, None] * VALUE + f[None, :]
    for again in range(2):
        for job in range(count):
            source, target = tl.load(sources + job), tl.load(targets + job)
            if (source == target) == (again == 1):
                right = tl.load(counts + job)
                slots = (tl.load(rows + job) * LAYERS + layer) * most * HEADS + head
                last = tl.load(kept_decay + slots + (right - 1) * HEADS)
                state = tl.load(states + source * (LAYERS * HEADS * KEY * VALUE), mask=of_state, other=0.0)
                state *= tl.exp(last)
                for place in range(right):
                    slot = slots + place * HEADS
                    k = tl.load(kept_keys + slot * KEY + e, mask=of_keys, other=0.0)
                    correction = tl.load(kept_corrections + slot * VALUE + f, mask=of_values, other=0.0)
                    state += (k * tl.exp(last - tl.load(kept_decay + slot)))[:, None] * correction[None, :]
                tl.debug_barrier()
                tl.store(states + target * (LAYERS * HEADS * KEY * VALUE), state, mask=of_state)
