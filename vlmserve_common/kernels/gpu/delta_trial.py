"""A trial of the kernels of gated delta nets, before they are used."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vlmserve_common.compute.delta_rule import CHUNK, ChunkTable, causal_conv, chunk_rule, unit_heads
from vlmserve_common.kernels.delta_step import DeltaWeights
from vlmserve_common.kernels.gpu.delta_conv import convolve_chunks, convolve_few
from vlmserve_common.kernels.gpu.delta_rule import NetStep, run_chunks, run_few


@torch.inference_mode()
def trial(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> float:
    """Return the largest difference, to torch in float32, of a prompt of two chunks and of a token behind it; inf for
    NaN."""
    tokens, heads = CHUNK + 6, 2
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    mixed, b, a = normal(tokens, 2 * key_dim + heads * value_dim), normal(tokens, heads), normal(tokens, heads)
    weights = DeltaWeights(
        conv=normal(mixed.shape[1], 4),
        a_log=normal(heads),
        dt_bias=normal(heads),
        norm=normal(value_dim),
        eps=1e-6,
        sigmoid_gate=False,
        key_heads=1,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    conv, recurrent = mixed.new_zeros(2, 3, mixed.shape[1]), torch.zeros(2, heads, key_dim, value_dim, device=device)
    x = causal_conv(conv[0], mixed, weights.conv)
    q, k = (unit_heads(part.unflatten(1, (1, key_dim)), heads) for part in x[:, : 2 * key_dim].split(key_dim, dim=1))
    g = -weights.a_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float())
    v = x[:, 2 * key_dim :].unflatten(1, (heads, value_dim)).float()
    wanted, state = chunk_rule(q, k, v, g, b.sigmoid().float(), recurrent[0])

    net = NetStep(
        mixed=torch.empty_like(mixed),
        b=b,
        a=a,
        weights=weights,
        recurrent=recurrent,
        out=mixed.new_empty(tokens, heads, value_dim),
    )
    whole = tokens - 1
    rows = ((0, CHUNK, 0, 0, -1), (CHUNK, whole, 0, 0, 1))
    chunks, starts = (torch.tensor(part, dtype=torch.int32, device=device) for part in (rows, (0, 2)))
    table = ChunkTable(chunks=chunks, starts=starts)
    convolve_chunks(mixed, weights.conv, conv, table, net.mixed)
    run_chunks(net, table)
    states, last = torch.ones(1, dtype=torch.int64, device=device), torch.full((1, 1), whole, device=device)
    convolve_few(mixed, weights.conv, conv, states, last, net.mixed)
    run_few(net, states, last)
    apart = torch.stack(((net.out.float() - wanted).abs().max(), (recurrent[1] - state).abs().max()))
    return float(apart.max().nan_to_num(torch.inf))
