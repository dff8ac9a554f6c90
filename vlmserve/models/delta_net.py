"""A gated delta net: the recurrent layer of hybrid models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve.memory.recurrent_cache import GuessedTokens, RecurrentStep, Span
from vlmserve.models.attention.base import ForwardBatch
from vlmserve.models.config import LinearAttentionConfig, ModelConfig
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.delta_rule import (
    CHUNK,
    KeptGuesses,
    causal_conv,
    chunk_rule,
    look_ahead,
    recurrent_step,
    unit_heads,
)
from vlmserve_common.compute.layers import GatedRMSNorm
from vlmserve_common.compute.linear import MergedLinear, row_linear
from vlmserve_common.compute.shard import Cut, Cuts, stacked
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.delta_step import DeltaWeights, can_step, delta_step

_RUN = 16 * CHUNK
"""The most tokens that are computed together, so that their memory does not grow with the prompt."""


class ConvWeight(nn.Module):
    """A convolution's weight [channels, 1, width]. channels: this process's part of the stored ones."""

    def __init__(self, channels: Cuts, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels.size, 1, width), requires_grad=False)
        self._channels = channels

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cuts]]:
        """See `checkpoint.weights`."""
        yield f"{name}.weight", self._channels


class GatedDeltaNet(nn.Module):
    """A gated delta net (see `compute.delta_rule`). index: its place among the recurrent layers.

    A request's state in it is the last inputs of the convolution, and the delta rule's state. If processes share the
    model, each has some key heads, the value heads that they serve, and their states.
    """

    def __init__(self, config: ModelConfig, comm: Communicator, linear: LinearAttentionConfig, index: int) -> None:
        super().__init__()
        hidden, comm = config.hidden_size, comm.attention
        shard = comm.shard
        keys = shard.cut_heads(linear.num_key_heads, linear.key_dim, "linear_num_key_heads")
        values = shard.cut_heads(linear.num_value_heads, linear.value_dim, "linear_num_value_heads")
        channels, heads = stacked((keys, keys, values)), shard.cut(linear.num_value_heads, "linear_num_value_heads")
        self.in_proj_qkvz = MergedLinear(hidden, {"in_proj_qkv": channels, "in_proj_z": values}, bias=False)
        self.in_proj_ba = MergedLinear(hidden, {"in_proj_b": heads, "in_proj_a": heads}, bias=False)
        self.in_proj_ba.may_be_quantised = False
        self.conv1d = ConvWeight(channels, linear.conv_width)
        self.A_log = nn.Parameter(torch.empty(heads.size), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads.size), requires_grad=False)
        self.norm = GatedRMSNorm(linear.value_dim, config.rms_norm_eps, linear.gate_act)
        self.out_proj = row_linear(
            linear.value_size, hidden, bias=False, comm=comm, what="linear_num_value_heads * linear_value_head_dim"
        )
        self._linear = linear.of_part(shard)
        self._heads_cut = heads
        self._index = index

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cut]]:
        """See `checkpoint.weights`."""
        yield f"{name}.A_log", self._heads_cut
        yield f"{name}.dt_bias", self._heads_cut

    def forward(
        self, x: torch.Tensor, forward_batch: ForwardBatch, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden], added to `residual`."""
        linear, step = self._linear, forward_batch.recurrent
        assert step is not None, "a step without states"
        mixed, gate = self.in_proj_qkvz(x).split([linear.conv_size, linear.value_size], dim=-1)
        b, a = self.in_proj_ba(x).chunk(2, dim=-1)
        if fused.runs_delta_nets(mixed, linear.key_dim, linear.value_dim):
            return self.out_proj(self._run_kernels(mixed, gate, b, a, step), residual=residual)
        singles = step.single_states
        native = singles is not None and can_step(mixed, linear.key_dim, linear.value_dim)
        if native and not step.spans and not step.guessed:
            normed = x.new_empty(len(x), linear.value_size)
        else:
            beta = b.sigmoid().float()
            g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
            out = x.new_empty(len(x), linear.num_value_heads, linear.value_dim)
            for span in step.spans:
                self._run_span(mixed, g, beta, out, step, span)
            for guessed in step.guessed:
                self._run_guessed(mixed, g, beta, out, step, guessed)
            if singles is not None and not native:
                self._run_singles(mixed, g, beta, out, step, singles)
            normed = self.norm(out, gate.view_as(out)).flatten(1)
        if native and singles is not None:
            conv, recurrent = (part[:, self._index] for part in (step.cache.conv, step.cache.recurrent))
            delta_step(mixed, gate, b, a, self._weights(), conv, recurrent, singles, step.single_tokens, normed)
        return self.out_proj(normed, residual=residual)

    def _weights(self) -> DeltaWeights:
        linear = self._linear
        return DeltaWeights(
            conv=self.conv1d.weight[:, 0],
            a_log=self.A_log,
            dt_bias=self.dt_bias,
            norm=self.norm.weight,
            eps=self.norm.eps,
            sigmoid_gate=linear.gate_act == "sigmoid",
            key_heads=linear.num_key_heads,
            value_heads=linear.num_value_heads,
            key_dim=linear.key_dim,
            value_dim=linear.value_dim,
        )

    def _run_kernels(
        self, mixed: torch.Tensor, gate: torch.Tensor, b: torch.Tensor, a: torch.Tensor, step: RecurrentStep
    ) -> torch.Tensor:
        """Run all between the products by Triton, in a few launches. The host reads nothing from the device."""
        from vlmserve_common.kernels.gpu import delta_conv, delta_rule  # not where there is no GPU

        weights, at = self._weights(), self._index
        convs, states = step.cache.conv[:, at], step.cache.recurrent[:, at]
        net = delta_rule.NetStep(
            mixed=mixed.new_empty(mixed.shape),
            b=b,
            a=a,
            weights=weights,
            recurrent=states,
            out=mixed.new_empty(len(mixed), weights.value_heads, weights.value_dim),
        )
        if step.spans:
            delta_conv.convolve_chunks(mixed, weights.conv, convs, step.chunks, net.mixed)
            delta_rule.run_chunks(net, step.chunks)
        for guessed in step.guessed:
            kept, own, tokens = step.cache.guesses, guessed.states, guessed.tokens
            assert kept is not None, "no room for guesses"
            keys, corrections, decay = (part[:, at] for part in (kept.keys, kept.corrections, kept.decay))
            guesses = KeptGuesses(keys=keys, corrections=corrections, decay=decay, rows=guessed.rows)
            delta_conv.convolve_few(
                mixed, weights.conv, convs, own, tokens, net.mixed, (kept.conv[:, at], guessed.rows)
            )
            delta_rule.run_few(net, own, tokens, guesses)
        if step.single_states is not None:
            singles = None if step.single_tokens is None else step.single_tokens[:, None]
            delta_conv.convolve_few(mixed, weights.conv, convs, step.single_states, singles, net.mixed)
            delta_rule.run_few(net, step.single_states, singles)
        return self.norm(net.out, gate.view_as(net.out)).flatten(1)

    def _run_span(
        self,
        mixed: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        step: RecurrentStep,
        span: Span,
    ) -> None:
        convs, states = (part[:, self._index] for part in (step.cache.conv, step.cache.recurrent))
        conv, state = convs[span.state], states[span.state]
        ends = span.ends
        for first, last in span.runs(_RUN):
            tokens = slice(span.start + first, span.start + last)
            x = mixed[tokens]
            q, k, v = self._heads(causal_conv(conv, x, self.conv1d.weight[:, 0]))
            out[tokens], state = chunk_rule(q, k, v, g[tokens], beta[tokens], state)
            conv = torch.cat((conv, x))[-len(conv) :]
            if (place := ends.get(last)) is not None:
                convs[place] = conv
                states[place] = state

    def _run_guessed(
        self,
        mixed: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        step: RecurrentStep,
        guessed: GuessedTokens,
    ) -> None:
        convs, states = (part[:, self._index] for part in (step.cache.conv, step.cache.recurrent))
        kept, tokens = step.cache.guesses, guessed.tokens
        assert kept is not None, "no room for guesses"
        before, x = convs[guessed.states], mixed[tokens]
        q, k, v = self._heads(causal_conv(before, x, self.conv1d.weight[:, 0]))
        made, corrections = look_ahead(q, k, v, g[tokens], beta[tokens], states[guessed.states])
        out[tokens] = made.to(out.dtype)
        for whole, part in (
            (kept.conv, torch.cat((before, x), dim=1)),
            (kept.keys, k),
            (kept.corrections, corrections),
            (kept.decay, g[tokens].cumsum(1)),
        ):
            whole[guessed.rows, self._index, : part.shape[1]] = part

    def _run_singles(
        self,
        mixed: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
        step: RecurrentStep,
        rows: torch.Tensor,
    ) -> None:
        convs, states = (part[:, self._index] for part in (step.cache.conv, step.cache.recurrent))
        tokens = step.single_tokens
        if tokens is not None:
            mixed, g, beta = mixed[tokens], g[tokens], beta[tokens]
        before, state = convs[rows], states[rows]
        q, k, v = self._heads(causal_conv(before, mixed[:, None], self.conv1d.weight[:, 0])[:, 0])
        made = recurrent_step(q, k, v, g, beta, state).to(out.dtype)
        convs[rows] = torch.cat((before[:, 1:], mixed[:, None]), dim=1)
        states[rows] = state
        if tokens is None:
            out.copy_(made)
        else:
            out[tokens] = made

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split mixed [T, channels] into queries, keys [T, heads, key_dim] and values [T, heads, value_dim], in
        float32."""
        linear = self._linear
        q, k, v = mixed.split([linear.key_size, linear.key_size, linear.value_size], dim=-1)
        q, k = (unit_heads(part.unflatten(-1, (-1, linear.key_dim)), linear.num_value_heads) for part in (q, k))
        return q, k, v.unflatten(-1, (-1, linear.value_dim)).float()
