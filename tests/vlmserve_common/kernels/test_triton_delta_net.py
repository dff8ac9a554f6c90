"""Gated delta nets in Triton against torch's, for prompts, single tokens and guesses of several requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests import hf_env  # noqa: F401
from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES, assert_rounded_alike, seeded
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep, Span, StateShape
from vlmserve_common.compute import delta_rule as by_torch
from vlmserve_common.compute.delta_rule import CHUNK, KeptGuesses
from vlmserve_common.compute.layers import GatedRMSNorm
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.delta_step import DeltaWeights

conv = pytest.importorskip("vlmserve_common.kernels.gpu.delta_conv")
rule = pytest.importorskip("vlmserve_common.kernels.gpu.delta_rule")

WIDTH, LAYERS, LAYER = 4, 2, 1
HEADS = ((1, 2, 16, 24), (2, 2, 32, 16), (1, 4, 24, 40))
"""Key heads, value heads, and the elements of each."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 3e-3}


@dataclass(frozen=True, kw_only=True)
class Net:
    """A net, inputs of its products' sizes that lie beside others, and states in which all of a layer is set."""

    weights: DeltaWeights
    mixed: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    cache: RecurrentCache

    @classmethod
    def make(cls, heads=HEADS[0], dtype=torch.float32, *, tokens=0, states=9, seed=0) -> Net:
        key_heads, value_heads, key_dim, value_dim = heads
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        weights = DeltaWeights(
            conv=seeded(seed, channels, WIDTH, dtype=dtype) / 2,
            a_log=seeded(seed + 1, value_heads, dtype=dtype),
            dt_bias=seeded(seed + 2, value_heads, dtype=dtype),
            norm=seeded(seed + 3, value_dim, dtype=dtype),
            eps=1e-6,
            sigmoid_gate=False,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        shape = StateShape(
            conv=(LAYERS, WIDTH - 1, channels),
            recurrent=(LAYERS, value_heads, key_dim, value_dim),
            conv_dtype=dtype,
        )
        cache = RecurrentCache(states, shape, DEVICE)
        for number, part in enumerate((cache.conv, cache.recurrent)):
            part[1:, LAYER] = seeded(seed + 4 + number, *part[1:, LAYER].shape, dtype=part.dtype)
        b, a = seeded(seed + 6, tokens, 2 * value_heads, dtype=dtype).chunk(2, dim=1)
        return cls(
            weights=weights,
            mixed=seeded(seed + 7, tokens, channels + 16, dtype=dtype)[:, :channels],
            b=b,
            a=a,
            cache=cache,
        )

    @property
    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.conv[:, LAYER], self.cache.recurrent[:, LAYER]

    def step(self) -> rule.NetStep:
        """What no token is there for is NaN."""
        weights, count = self.weights, len(self.mixed)
        heads = (count, weights.value_heads, weights.value_dim)
        return rule.NetStep(
            mixed=self.mixed.new_full(self.mixed.shape, torch.nan),
            b=self.b,
            a=self.a,
            weights=weights,
            recurrent=self.states[1],
            out=self.mixed.new_full(heads, torch.nan),
        )

    def inputs(self, convolved: torch.Tensor, tokens: torch.Tensor | slice) -> list[torch.Tensor]:
        """q, k, v, g, beta float32 of tokens, as torch's operators take them."""
        weights, size = self.weights, self.weights.key_heads * self.weights.key_dim
        q, k, v = convolved.split([size, size, convolved.shape[-1] - 2 * size], dim=-1)
        q, k = (by_torch.unit_heads(part.unflatten(-1, (-1, weights.key_dim)), weights.value_heads) for part in (q, k))
        g = -weights.a_log.float().exp() * F.softplus(self.a[tokens].float() + weights.dt_bias)
        return [q, k, v.unflatten(-1, (-1, weights.value_dim)).float(), g, self.b[tokens].sigmoid().float()]

    def run_spans(self, spans) -> torch.Tensor:
        """By the kernels."""
        step, table = self.step(), RecurrentStep(cache=self.cache, spans=tuple(spans)).chunks
        conv.convolve_chunks(self.mixed, self.weights.conv, self.states[0], table, step.mixed)
        rule.run_chunks(step, table)
        return step.out

    def run_few(self, states, tokens=None, kept=None, inputs=None) -> torch.Tensor:
        """By the kernels. kept, inputs: where guesses are kept."""
        step, rows = self.step(), torch.tensor(states, device=DEVICE)
        tokens = None if tokens is None else torch.tensor(tokens, device=DEVICE)
        places = None if kept is None else (inputs, kept.rows)
        conv.convolve_few(self.mixed, self.weights.conv, self.states[0], rows, tokens, step.mixed, places)
        rule.run_few(step, rows, tokens, kept)
        return step.out

    def by_torch(self, tokens, before: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Tokens one after the other: what comes out [T, heads, value_dim] float32, and the states behind each."""
        x = self.mixed[tokens]
        q, k, v, g, beta = self.inputs(by_torch.causal_conv(before[0], x, self.weights.conv), tokens)
        state, outs, states = before[1][None].clone(), [], []
        for i in range(len(x)):
            parts = (part[i : i + 1] for part in (q, k, v, g, beta))
            outs.append(by_torch.recurrent_step(*parts, state))
            states.append(state[0].clone())
        every = torch.cat((before[0], x))
        return torch.cat(outs), torch.stack([every[i + 1 : i + WIDTH] for i in range(len(x))]), torch.stack(states)


def copies(net: Net) -> list[torch.Tensor]:
    return [part.clone() for part in (net.cache.conv, net.cache.recurrent)]


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[Span], int]:
    """Spans with tokens of others between them, and the number of all tokens."""
    spans, start, free = [], 0, iter(range(4, 10))
    for number in range(draw(st.integers(1, 2))):
        start += draw(st.integers(0, 2))
        length, prefix_len = draw(st.integers(1, 110)), draw(st.integers(0, 130))
        places = draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else ()
        kept = {place: next(free) for place in places}
        spans.append(Span(start=start, length=length, prefix_len=prefix_len, state=1 + number, kept=kept))
        start += length
    return spans, start + draw(st.integers(0, 1))


@settings(max_examples=6)
@given(prompts(), st.sampled_from(HEADS), st.sampled_from(DTYPES), st.integers(0, 99))
def test_prompts(prompts, heads, dtype, seed):
    spans, tokens = prompts
    net = Net.make(heads, dtype, tokens=tokens, seed=seed)
    before = copies(net)
    found, touched = net.run_spans(spans), {0}
    for span in spans:
        own = slice(span.start, span.start + span.length)
        wanted, convs, states = net.by_torch(own, [part[span.state, LAYER] for part in before])
        assert_close(found[own], wanted, dtype)
        for last, state in {**span.kept, span.length: span.state}.items():
            assert torch.equal(net.cache.conv[state, LAYER], convs[last - 1])
            assert_close(net.cache.recurrent[state, LAYER], states[last - 1], dtype)
            touched.add(state)
        found[own] = torch.nan
    assert found.isnan().all(), "rows of others"
    others = [state for state in range(10) if state not in touched]
    for part, was in zip((net.cache.conv, net.cache.recurrent), before, strict=True):
        assert torch.equal(part[others], was[others])
        assert not part[0].any()
        assert not part[:, 0].any(), "the other layer's"


@pytest.mark.parametrize(("prefix_len", "cuts"), [(0, (64,)), (0, (128, 192)), (40, (24, 152))], ids=str)
def test_a_prompt_cut_at_chunks_has_the_same_bits(prefix_len, cuts):
    """Also if it is not alone."""
    tokens, mate = 230, Span(start=230, length=9, prefix_len=3, state=2)
    net, whole = Net.make(tokens=tokens + 9), Net.make(tokens=tokens + 9)
    wanted = whole.run_spans([Span(start=0, length=tokens, prefix_len=prefix_len, state=1)])
    for start, end in zip((0, *cuts), (*cuts, tokens), strict=True):
        span = Span(start=start, length=end - start, prefix_len=prefix_len + start, state=1)
        found = net.run_spans([mate, span] if start else [span])
        assert torch.equal(found[start:end], wanted[start:end])
    assert torch.equal(net.cache.recurrent[1], whole.cache.recurrent[1])
    assert torch.equal(net.cache.conv[1], whole.cache.conv[1])


def test_equal_tokens_that_are_never_forgotten():
    """A chunk's inverse has large powers of its system in it, then: nothing may come of them."""
    tokens = 2 * CHUNK
    net = Net.make(HEADS[1], tokens=tokens)
    net.mixed[:] = net.mixed[0]
    net.weights.a_log.fill_(-20)
    net.b.fill_(8)
    before = [part[1, LAYER].clone() for part in (net.cache.conv, net.cache.recurrent)]
    found = net.run_spans([Span(start=0, length=tokens, prefix_len=0, state=1)])
    wanted, _, states = net.by_torch(slice(0, tokens), before)
    assert_close(found, wanted, torch.float32)
    assert_close(net.cache.recurrent[1, LAYER], states[-1], torch.float32)


@pytest.mark.parametrize("tokens", [7, 100])
def test_prompts_and_single_tokens_are_those_of_transformers(tokens):
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    net = Net.make(HEADS[0], tokens=tokens + 1)
    weights, (convs, recurrent) = net.weights, net.states
    every = torch.cat((convs[1], net.mixed)).t()[None]
    mixed = F.silu(F.conv1d(every, weights.conv[:, None], groups=len(weights.conv)))[0].t()
    g = -weights.a_log.exp() * F.softplus(net.a + weights.dt_bias)
    size = weights.key_heads * weights.key_dim
    q, k = (part.unflatten(1, (-1, weights.key_dim)) for part in mixed[:, : 2 * size].split(size, dim=1))
    q, k = (part.repeat_interleave(weights.value_heads // weights.key_heads, dim=1) for part in (q, k))
    parts = (q, k, mixed[:, 2 * size :].unflatten(1, (-1, weights.value_dim)), g, net.b.sigmoid())
    state, wanted = recurrent[1][None].clone(), []
    for theirs, rows in ((torch_chunk_gated_delta_rule, slice(0, tokens)), (torch_recurrent_gated_delta_rule, [-1])):
        q, k, v, g, beta = (part[rows][None] for part in parts)
        made, state = theirs(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        wanted.append(made[0])
    found = net.run_spans([Span(start=0, length=tokens, prefix_len=0, state=1)])
    found[-1] = net.run_few([1], [[tokens]])[-1]
    assert_close(found, torch.cat(wanted), torch.float32)
    assert_close(recurrent[1], state[0], torch.float32)


@settings(max_examples=8)
@given(
    st.permutations(range(1, 6)),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(HEADS),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_single_tokens(states, count, every, heads, dtype, seed):
    """Of all of a batch, behind which padding has one state, or of some."""
    states, padding = states[:count], [9, 9] if every else []
    net = Net.make(heads, dtype, tokens=count + 2, seed=seed)
    tokens = list(range(count)) if every else list(range(1, count + 1))[::-1]
    before = copies(net)
    found = net.run_few(states + padding, None if every else [[token] for token in tokens])
    for token, state in zip(tokens, states, strict=True):
        wanted, convs, after = net.by_torch([token], [part[state, LAYER] for part in before])
        assert_close(found[token], wanted[0], dtype)
        assert torch.equal(net.cache.conv[state, LAYER], convs[0])
        assert_close(net.cache.recurrent[state, LAYER], after[0], dtype)
    others = [state for state in range(10) if state not in (*states, *padding)]
    for part, was in zip((net.cache.conv, net.cache.recurrent), before, strict=True):
        assert torch.equal(part[others], was[others])
        assert not part[:, 0].any(), "the other layer's"
    if not every:
        found[tokens] = torch.nan
        assert found.isnan().all(), "rows of others"


def test_padding_changes_no_bit():
    alone, padded = Net.make(tokens=1), Net.make(tokens=1)
    padded = replace(padded, **{name: getattr(padded, name).expand(4, -1).clone() for name in ("mixed", "b", "a")})
    wanted, found = alone.run_few([3]), padded.run_few([3, 9, 9, 9])
    assert torch.equal(found[0], wanted[0])
    for part, other in ((padded.cache.conv, alone.cache.conv), (padded.cache.recurrent, alone.cache.recurrent)):
        assert torch.equal(part[:9], other[:9])


@settings(max_examples=6)
@given(
    st.integers(2, 5), st.lists(st.integers(1, 5), min_size=2, max_size=2), st.sampled_from(DTYPES), st.integers(0, 99)
)
def test_guesses_and_states_behind_the_right_ones(length, right, dtype, seed):
    """Of two requests, of which the first also has a snapshot."""
    heads = HEADS[2]
    net, room = Net.make(heads, dtype, tokens=2 * length + 1, seed=seed), 6
    _, count, key_dim, value_dim = heads
    keys, corrections, decay = (
        torch.full((3, LAYERS, room, count, *size), torch.nan, device=DEVICE) for size in ((key_dim,), (value_dim,), ())
    )
    inputs = net.mixed.new_zeros(3, LAYERS, WIDTH - 1 + room, net.mixed.shape[1])
    rows = torch.tensor([2, 0], device=DEVICE)
    own = KeptGuesses(keys=keys[:, LAYER], corrections=corrections[:, LAYER], decay=decay[:, LAYER], rows=rows)
    tokens = [[*range(1, 1 + length)], [*range(1 + length, 1 + 2 * length)][::-1]]
    before = copies(net)
    found = net.run_few([4, 1], tokens, own, inputs[:, LAYER])
    for part, was in zip((net.cache.conv, net.cache.recurrent), before, strict=True):
        assert torch.equal(part, was)
    right = [min(one, length) for one in right]
    jobs = [(4, 2, right[0], 4), (1, 0, right[1], 1), (4, 2, 1, 6)]
    sources, rows, counts, targets = torch.tensor(jobs, device=DEVICE).T
    keys[:, 0] = corrections[:, 0] = decay[:, 0] = 0
    rule.advance(
        net.cache.recurrent,
        KeptGuesses(keys=keys, corrections=corrections, decay=decay, rows=rows),
        *(sources, counts, targets),
    )
    for own_tokens, state, row, last in ((tokens[0], 4, 2, right[0]), (tokens[1], 1, 0, right[1])):
        wanted, _, states = net.by_torch(own_tokens, [part[state, LAYER] for part in before])
        assert_close(found[own_tokens], wanted, dtype)
        assert_close(net.cache.recurrent[state, LAYER], states[last - 1], dtype)
        every = torch.cat((before[0][state, LAYER], net.mixed[own_tokens]))
        assert torch.equal(inputs[row, LAYER, : len(every)], every)
        if state == 4:
            assert_close(net.cache.recurrent[6, LAYER], states[0], dtype)
    assert not inputs[1].any()
    assert keys[1, LAYER].isnan().all()


@settings(max_examples=8)
@given(
    st.integers(0, 4), st.integers(1, 5), st.integers(1, 130), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 9)
)
def test_gated_norms(rows, heads, size, sigmoid, dtype, seed):
    norm = GatedRMSNorm(size, 1e-6, "sigmoid" if sigmoid else "silu").to(DEVICE, dtype)
    norm.weight.copy_(1 + seeded(seed, size, dtype=dtype) / 4)
    x = seeded(seed + 1, rows, heads, size, dtype=dtype)
    gate = seeded(seed + 2, rows, heads * size + 3, dtype=dtype)[:, 3:].unflatten(1, (heads, size))
    wanted = norm(x, gate)
    fused.activate("triton", DEVICE)
    try:
        found = norm(x, gate)
    finally:
        fused.activate("torch", DEVICE)
    assert_rounded_alike(found, wanted)


def test_a_trial_that_fails_leaves_it_to_torch(monkeypatch, caplog):
    from vlmserve_common.kernels.gpu import delta_trial

    fused.activate("triton", DEVICE)
    try_it = fused.delta_kernels_work.__wrapped__  # without what is remembered
    for dtype in DTYPES:
        assert try_it(DEVICE, dtype, 24, 16)
    assert not caplog.text
    monkeypatch.setattr(delta_trial, "run_few", lambda net, states, tokens: None)
    assert not try_it(DEVICE, torch.float32, 24, 16)
    assert "gated delta nets by torch" in caplog.text
    assert "wrong on this device" in caplog.text
