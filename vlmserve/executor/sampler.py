"""From logits to tokens.

Randomness is a pure function of (seed, output index, token id): an integer hash turned into Gumbel noise, so a sampled
answer does not change with batch mates, chunking, retraction, device or torch version. Picking the largest
log-probability plus Gumbel noise samples from the distribution (Gumbel-max trick).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vlmserve.executor.gumbel import choose
from vlmserve.executor.logits_processors import LogitsProcessors
from vlmserve.executor.logprobs import row_logprobs
from vlmserve.executor.model_worker_batch import LogprobRows, SamplingBatchInfo
from vlmserve_common.kernels.argmax import argmax

# Below, logits divided by it may overflow, and the choice is the greedy one anyway.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplerOutput:
    """As in `ModelWorkerResult`, on the device."""

    next_token_ids: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    asked_logprobs: torch.Tensor
    failures: tuple[tuple[int, str], ...] = ()


def sample(logits: torch.Tensor, info: SamplingBatchInfo, processors: LogitsProcessors | None = None) -> SamplerOutput:
    """logits float32 [S, vocab], which may be written to -> one token each. Reported logprobs are of the logits as the
    model gave them. Grammars come last: what they forbid nothing can allow.

    processors: applied behind penalties and bias.
    """
    raw = logits
    logits = _adjust(logits, info)
    failures: tuple[tuple[int, str], ...] = ()
    if info.processing:
        assert processors is not None
        logits, failures = processors.apply(logits.clone() if logits is raw else logits, info.processing)
    if len(info.masked_rows):
        # most requests want no logprobs, and a copy takes as long as masking and choosing together
        logits = logits.clone() if logits is raw and (info.num_logprobs >= 0).any() else logits
        tokens = _mask(logits, info)
    else:
        tokens = argmax(logits)
    random_rows = np.flatnonzero(info.temperatures >= MIN_TEMPERATURE)
    if len(random_rows):
        index = torch.from_numpy(random_rows).to(logits.device)
        tokens[index] = _sample_random(logits[index], info, random_rows)
    return _with_logprobs(raw, tokens, info, failures)


def _adjust(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Penalties and logit bias, on a copy where there are any."""
    if not len(info.bias_rows) and not len(info.count_rows) and not len(info.seen_rows):
        return logits
    logits = logits.clone()

    def to(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(logits.device)

    if len(info.seen_rows):
        index = (to(info.seen_rows), to(info.seen_ids))
        factor, found = to(info.repetition[info.seen_rows]), logits[index]
        logits[index] = torch.where(found > 0, found / factor, found * factor)
    if len(info.count_rows):
        counts = info.count_values.astype(np.float32)
        penalty = info.frequency[info.count_rows] * counts + info.presence[info.count_rows] * (counts > 0)
        logits.index_put_((to(info.count_rows), to(info.count_ids)), -to(penalty.astype(np.float32)), accumulate=True)
    if len(info.bias_rows):
        logits.index_put_((to(info.bias_rows), to(info.bias_ids)), to(info.bias_values), accumulate=True)
    return logits


def _mask(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """Set logits to -inf, in place, of tokens that a grammar does not allow; returns the likeliest token of each row.

    Where all that a grammar allows was ruled out before (the end of an answer, by `min_tokens`), its tokens are alike.
    """
    rows = torch.from_numpy(info.masked_rows).to(logits.device)
    forbidden = _forbidden(info.bitmasks, logits)
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
    tokens = argmax(logits)
    ruled_out = logits[rows, tokens[rows]] == -torch.inf
    if ruled_out.any():
        alike = torch.zeros_like(forbidden[ruled_out], dtype=logits.dtype)
        logits[rows[ruled_out]] = alike.masked_fill_(forbidden[ruled_out], -torch.inf)
        tokens = argmax(logits)
    return tokens


def _forbidden(bitmasks: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """bool [G, vocab]: where a bit is 0. On a CPU by numpy: torch takes ten times as long there, as does xgrammar's own
    operator, which starts threads."""
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        allowed = np.unpackbits(bitmasks.view(np.uint8), axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(allowed == 0)
    return _unpacked_zeros(torch.from_numpy(bitmasks).to(logits.device, non_blocking=True), vocab)


def _unpacked_zeros(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Of int32 [G, words], on their device, to which the bits themselves would take eight times as long."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab]


def _sample_random(logits: torch.Tensor, info: SamplingBatchInfo, rows: np.ndarray) -> torch.Tensor:
    device, vocab = logits.device, logits.shape[1]

    def column(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array[rows]).to(device)[:, None]

    scores = torch.log_softmax(logits / column(info.temperatures), dim=-1)
    top_ks, top_ps, min_ps = info.top_ks[rows], info.top_ps[rows], info.min_ps[rows]
    limited = (top_ks > 0) & (top_ks < vocab)
    if limited.any() or (top_ps < 1).any():
        # only as many candidates are sorted as the largest top_k needs
        keep = int(top_ks.max()) if limited.all() else vocab
        values, ids = torch.topk(scores, min(keep, vocab), dim=-1) if keep < vocab else scores.sort(-1, descending=True)
        rank = torch.arange(values.shape[1], device=device)[None]
        limit = torch.from_numpy(np.where(limited, top_ks, vocab)).to(device)[:, None]
        values = values.masked_fill(rank >= limit, -torch.inf)
        values = torch.log_softmax(values, dim=-1)
        before = values.exp().cumsum(-1) - values.exp()  # mass of the better tokens
        values = values.masked_fill((before > 0) & (before >= column(info.top_ps)), -torch.inf)
    else:
        values, ids = scores, None
    if (min_ps > 0).any():
        best = values.max(dim=-1, keepdim=True).values
        values = values.masked_fill(values < best + column(info.min_ps).log(), -torch.inf)
    seeds, indices = (torch.from_numpy(array[rows]).to(device) for array in (info.seeds, info.output_indices))
    return choose(values, ids, seeds, indices)


def _with_logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, info: SamplingBatchInfo, failures: tuple[tuple[int, str], ...]
) -> SamplerOutput:
    rows, device = raw.shape[0], raw.device
    width = max(int(info.num_logprobs.max(initial=0)), 0)
    chosen = torch.full((rows,), torch.nan, device=device)
    top_ids = torch.zeros((rows, width), dtype=torch.int64, device=device)
    top_logprobs = torch.full((rows, width), torch.nan, device=device)
    asked_logprobs = torch.zeros(0, device=device)
    wanted = np.flatnonzero(info.num_logprobs >= 0)
    if len(wanted):
        index = torch.from_numpy(wanted).to(device)
        found = row_logprobs(raw[index], tokens[index], _rows(info, wanted))
        chosen[index] = found.logprobs
        if width:
            top_logprobs[index], top_ids[index] = found.top_logprobs, found.top_ids
        asked_logprobs = found.asked
    return SamplerOutput(tokens, chosen, top_ids, top_logprobs, asked_logprobs, failures)


def _rows(info: SamplingBatchInfo, wanted: np.ndarray) -> LogprobRows:
    """What is asked of the rows `wanted`, ascending; nothing may be asked of others."""
    given = info.logprobs
    if given is None:
        ones, none = np.ones(len(wanted), dtype=np.float32), np.zeros(0, dtype=np.int64)
        return LogprobRows(
            tops=info.num_logprobs[wanted], temperatures=ones, top_ps=ones, asked_rows=none, asked_ids=none
        )
    return LogprobRows(
        tops=info.num_logprobs[wanted],
        temperatures=given.temperatures[wanted],
        top_ps=given.top_ps[wanted],
        asked_rows=np.searchsorted(wanted, given.asked_rows),
        asked_ids=given.asked_ids,
    )
