"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): linear attention whose state forgets and corrects itself.

A head's state S [key_dim, value_dim] goes over a token with query q, key k, value v, log decay g and rate beta as

    S <- exp(g) S;  S <- S + k (beta (v - k S));  out = q S

`recurrent_step` does that; `chunk_rule` comes to the same for a run of tokens by products of matrices, a chunk at a
time (`torch_chunk_gated_delta_rule` in transformers). Everything is computed in float32.

Behind n tokens, S is exp(G_n) S_0 + the sum of exp(G_n - G_j) k_j u_j over all j <= n, where u_j, the correction of
token j, is the bracket above, and G the sum of g so far. Neither depends on later tokens. So `look_ahead` computes a
few tokens of which some may be dropped and leaves the state alone, and `advance` takes it behind those that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

CHUNK = 64
"""Tokens of a chunk. A run that is cut at multiples of it is computed as if it were not cut."""
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class ChunkTable:
    """The chunks of several requests' tokens, on the device, for kernels. No chunk has over `CHUNK` tokens.

    chunks: int32 [chunks, 5], one request's behind another's: its first token in the batch, the one behind its last,
    the request's first token, the state that the request goes on from, and the state that is to be kept behind the
    chunk, or -1. starts: int32 [requests + 1], the first chunk of each.
    """

    chunks: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class KeptGuesses:
    """Where kernels keep what `advance` needs, or find it: keys [places, T or more, heads, key_dim], corrections [...,
    value_dim], decay [places, T or more, heads], the sums of g; float32. rows: int64 [n], the place of each request."""

    keys: torch.Tensor
    corrections: torch.Tensor
    decay: torch.Tensor
    rows: torch.Tensor


def unit_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x [..., h, dim] -> float32 [..., heads, dim] of length one; heads, a multiple of h: each one side by side."""
    wide = x.float()
    wide = wide * (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt_()
    return wide if heads == x.shape[-2] else wide.repeat_interleave(heads // x.shape[-2], dim=-2)


def recurrent_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Compute one token of each of B requests: q, k [B, heads, key_dim], v [B, heads, value_dim], g, beta [B, heads] ->
    [B, heads, value_dim]. state [B, heads, key_dim, value_dim] is updated. All float32."""
    state.mul_(g.exp()[..., None, None])
    known = (k.unsqueeze(-2) @ state).squeeze(-2)
    state.add_(k.unsqueeze(-1) * ((v - known) * beta.unsqueeze(-1)).unsqueeze(-2))
    return (_scaled(q).unsqueeze(-2) @ state).squeeze(-2)


def chunk_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute T tokens of one request: q, k [T, heads, key_dim], v [T, heads, value_dim], g, beta [T, heads], state
    [heads, key_dim, value_dim] -> [T, heads, value_dim] and the state behind. All float32."""
    whole = len(q) - len(q) % CHUNK
    outs = []
    for tokens, size in ((slice(0, whole), CHUNK), (slice(whole, len(q)), len(q) - whole)):
        if tokens.stop > tokens.start:
            parts = [
                x[tokens].transpose(0, 1).unflatten(1, (-1, size))
                for x in (
                    _scaled(q),
                    k,
                    v,
                    g,
                    beta,
                )
            ]
            out, state = _chunks(parts, state)
            outs.append(out)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)).transpose(0, 1), state


def look_ahead(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute T tokens of each of B requests, and keep the state: q, k [B, T, heads, key_dim], v [B, T, heads,
    value_dim], g, beta [B, T, heads], state [B, heads, key_dim, value_dim] -> what comes out and the corrections, both
    [B, T, heads, value_dim]. All float32."""
    parts = [x.transpose(1, 2).flatten(0, 1).unsqueeze(1) for x in (_scaled(q), k, v, g, beta)]
    made = _inside_chunks(parts).behind(0, state.flatten(0, 1))
    out, corrections = (x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in made)
    return out, corrections


def advance(
    state: torch.Tensor, k: torch.Tensor, corrections: torch.Tensor, decay: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return the states [B, heads, key_dim, value_dim] behind the first `counts` int64 [B], above 0, of T tokens.

    k, corrections: of `look_ahead`. decay: [B, T, heads], sums of g. Further tokens count for nothing, whatever they
    are.
    """
    last = decay.gather(1, (counts - 1)[:, None, None].expand(-1, 1, decay.shape[2]))
    beyond = (torch.arange(k.shape[1], device=k.device) >= counts[:, None])[:, :, None, None]
    writing = (k * (last - decay).exp().unsqueeze(-1)).masked_fill(beyond, 0)
    written = writing.permute(0, 2, 3, 1) @ corrections.masked_fill(beyond, 0).transpose(1, 2)
    return (state * last.exp().transpose(1, 2).unsqueeze(-1)).add_(written)


class _Chunks(NamedTuple):
    """Everything about chunks that does not depend on the state before them, [heads, n, ...]."""

    decay: torch.Tensor
    values: torch.Tensor
    known: torch.Tensor
    asking: torch.Tensor
    inside: torch.Tensor

    def behind(self, i: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what comes out of chunk i behind a state, and its corrections, both [heads, size, value_dim]."""
        new = self.values[:, i] - self.known[:, i] @ state
        return self.asking[:, i] @ state + self.inside[:, i] @ new, new


def _chunks(parts: Sequence[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all chunks. q, k, v [heads, n, size, dim], g, beta [heads, n, size] -> [heads, n * size, value_dim], the
    state behind."""
    k, made = parts[1], _inside_chunks(parts)
    writing = (k * (made.decay[..., -1:] - made.decay).exp().unsqueeze(-1)).transpose(-1, -2)
    kept = made.decay[..., -1].exp()[..., None, None]
    outs = []
    for i in range(k.shape[1]):
        out, new = made.behind(i, state)
        outs.append(out)
        state = state * kept[:, i] + writing[:, i] @ new
    return torch.cat(outs, dim=1), state


def _inside_chunks(parts: Sequence[torch.Tensor]) -> _Chunks:
    """Inside a chunk, a token's correction depends on those of tokens before it: a triangular system, solved for all
    chunks at once. Only products with the state are left to do one after the other."""
    q, k, v, g, beta = parts
    size = q.shape[2]
    decay = g.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    rated = k * beta.unsqueeze(-1)
    system = (rated @ k.transpose(-1, -2)) * between
    right = torch.cat((v * beta.unsqueeze(-1), rated * decay.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside = (q @ k.transpose(-1, -2)) * between
    return _Chunks(decay, values, known, asking=q * decay.exp().unsqueeze(-1), inside=inside)


def _scaled(q: torch.Tensor) -> torch.Tensor:
    return q * q.shape[-1] ** -0.5


def causal_conv(before: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convolve each channel over a token and those before it, and apply SiLU: before [..., width - 1, C], x [..., T,
    C], weight [C, width] -> [..., T, C]. The sum is in float32, in the same order whatever T is."""
    return dilated_conv(torch.cat((before, x), dim=-2), weight, 1)


def dilated_conv(x: torch.Tensor, weight: torch.Tensor, dilation: int) -> torch.Tensor:
    """Compute `causal_conv` of the last T of x [..., (width - 1) * dilation + T, C], with inputs `dilation` tokens
    apart -> [..., T, C]."""
    taps = weight.float()
    length = x.shape[-2] - (weight.shape[1] - 1) * dilation
    total = x.narrow(-2, 0, length).float() * taps[:, 0]
    for tap in range(1, weight.shape[1]):
        total.addcmul_(x.narrow(-2, tap * dilation, length).float(), taps[:, tap])
    return F.silu(total.to(x.dtype))
