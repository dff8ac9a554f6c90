"""Turns logits into tokens.

Randomness is a pure function of (seed, output index, token id): an integer hash, turned into Gumbel noise. So a sampled
answer does not change with batch mates, chunking, retraction, device or torch version. The largest log-probability plus
Gumbel noise is a sample of the distribution (Gumbel-max trick).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vlmserve.executor.logits_processors import LogitsProcessors
from vlmserve.executor.logprobs import DeviceLogprobs, row_logprobs
from vlmserve.executor.model_worker_batch import SamplingBatchInfo
from vlmserve.executor.sampler_inputs import Counted, RandomRows, Repeated, SamplerInputs
from vlmserve_common.compute.transfers import Upload, transfers_for
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.rows import argmax

_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9, the multipliers of SplitMix64's finalizer (Steele et al. 2014)
_M2 = -7723592293110705685  # 0x94D049BB133111EB
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SamplerOutput:
    """next_token_ids: int64 [S], on the device. wanted: int64 [W], on the host, the rows whose logprobs are asked for.
    logprobs: of these rows, on the device. failures: as in `ModelWorkerResult`."""

    next_token_ids: torch.Tensor
    wanted: np.ndarray
    logprobs: DeviceLogprobs | None
    failures: tuple[tuple[int, str], ...] = ()


def sample(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    inputs: SamplerInputs,
    *,
    processors: LogitsProcessors | None = None,
    in_flight: torch.Tensor | None = None,
) -> SamplerOutput:
    """Choose one token for each row of logits float32 [S, vocab], which may be written to.

    Reported logprobs come from the model's own logits. Grammars come last, so they can forbid any token. On a GPU
    nothing waits, except logits processors, which may. inputs: made by `sent`. processors: applied after
    penalties and bias. in_flight: ids of the tokens of `info.in_flight_rows`.
    """
    raw = logits
    logits = adjust(logits, inputs, in_flight)
    failures: tuple[tuple[int, str], ...] = ()
    if info.processing:
        assert processors is not None
        logits, failures = processors.apply(logits.clone() if logits is raw else logits, info.processing)
    if inputs.masked is not None:
        # most requests want no logprobs, and a copy takes as long as masking and choosing together
        logits = logits.clone() if logits is raw and inputs.logprobs is not None else logits
        tokens = _mask(logits, inputs.masked[0].tensor, _forbidden(inputs.masked[1].tensor, logits))
    else:
        tokens = argmax(logits)
    if inputs.random is not None:
        index = inputs.random.index.tensor
        if len(index) == len(logits):
            tokens = _sample_random(logits, inputs.random)
        else:
            tokens[index] = _sample_random(logits[index], inputs.random)
    found = None
    if inputs.logprobs is not None:
        index, asked = inputs.logprobs[0].tensor, inputs.logprobs[1]
        found = row_logprobs(raw[index], tokens[index], asked)
    return SamplerOutput(tokens, inputs.wanted, found, failures)


def sent(info: SamplingBatchInfo, logits: torch.Tensor) -> SamplerInputs:
    """Send what sampling takes besides logits [S, vocab] to their device."""
    upload = Upload(transfers_for(logits.device))
    inputs = SamplerInputs(info, logits.shape[1], upload)
    upload.send()
    return inputs


def _mask(logits: torch.Tensor, rows: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """Set logits of tokens that a grammar forbids to -inf, in place, and return the likeliest token of each row.

    rows: int64 [G], those with a grammar. forbidden: bool [G, vocab]. If everything that a grammar allows was ruled out
    before (the end of an answer, by `min_tokens`), its tokens count as equal.
    """
    every = len(rows) == len(logits)
    masked = logits.masked_fill_(forbidden, -torch.inf) if every else logits[rows].masked_fill_(forbidden, -torch.inf)
    if not every:
        logits[rows] = masked
    tokens = argmax(logits)
    ruled_out = (logits[rows, tokens[rows]] == -torch.inf)[:, None]
    # On a CPU asking is cheaper than computing for nothing; on a GPU it would wait for all that was launched.
    if not logits.is_cpu or ruled_out.any():
        logits[rows] = torch.where(ruled_out, torch.zeros_like(masked).masked_fill_(forbidden, -torch.inf), masked)
        tokens = argmax(logits)
    return tokens


def _forbidden(bitmasks: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [G, words] to bool [G, vocab]: True where a bit is 0. On a CPU numpy does this ten times faster than
    torch, and than xgrammar's own operator, which starts threads."""
    vocab = logits.shape[1]
    if logits.is_cpu:
        bits = bitmasks.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(bits, axis=1, count=vocab, bitorder="little") == 0)
    return _unpacked_zeros(bitmasks, vocab)


def _unpacked_zeros(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Unpack int32 [G, words] on their device; uploading unpacked bits would take eight times as long."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab]


def _sample_random(logits: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    vocab = logits.shape[1]
    scores = torch.log_softmax(logits / rows.temperatures.tensor[:, None], dim=-1)
    if rows.keep is not None and rows.limits is not None:
        keep, (top_ks, top_ps) = rows.keep, rows.limits
        values, ids = torch.topk(scores, keep, dim=-1) if keep < vocab else scores.sort(-1, descending=True)
        rank = torch.arange(values.shape[1], device=logits.device)[None]
        values = values.masked_fill(rank >= top_ks.tensor[:, None], -torch.inf)
        values = torch.log_softmax(values, dim=-1)
        before = values.exp().cumsum(-1) - values.exp()  # mass of the better tokens
        values = values.masked_fill((before > 0) & (before >= top_ps.tensor[:, None]), -torch.inf)
    else:
        values, ids = scores, None
    if rows.min_ps is not None:
        best = values.max(dim=-1, keepdim=True).values
        values = values.masked_fill(values < best + rows.min_ps.tensor[:, None].log(), -torch.inf)
    return choose(values, ids, rows.seeds.tensor, rows.output_indices.tensor)


def choose(
    scores: torch.Tensor, ids: torch.Tensor | None, seeds: torch.Tensor, output_indices: torch.Tensor
) -> torch.Tensor:
    """Choose the token of each row with the largest sum of score and Gumbel noise, the first of equals: int64 [S].

    scores: float32 [S, V], of tokens `ids` int64 [S, V]; None stands for 0 .. V - 1 in each row. seeds, output_indices:
    int64 [S].
    """
    if fused.usable(scores):
        from vlmserve_common.kernels.gpu import sampling  # not where there is no GPU

        return sampling.choose(scores, ids, seeds, output_indices)
    token_ids = torch.arange(scores.shape[1], device=scores.device)[None] if ids is None else ids
    choice = (scores + gumbel(seeds[:, None], output_indices[:, None], token_ids)).argmax(dim=-1)
    return choice if ids is None else ids.gather(1, choice[:, None])[:, 0]


def gumbel(seeds: torch.Tensor, output_indices: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise float32 [S, V], given seeds and output_indices int64 [S, 1], token_ids int64 [S or 1, V]."""
    stream = _mix(_mix(seeds + _GOLDEN) + output_indices * _GOLDEN)
    bits = _mix(stream + token_ids * _GOLDEN)
    uniform = ((bits >> 11) & 0x1FFFFFFFFFFFFF).double().add_(0.5).mul_(2.0**-53)
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer to int64 bit patterns (arithmetic shifts masked into logical ones)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def adjust(logits: torch.Tensor, inputs: SamplerInputs, in_flight: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits float32 [S, vocab] with penalties, bias and -inf for tokens that a request does not allow: the
    given tensor, or a changed copy.

    in_flight: int64, the ids of the tokens of `SamplingBatchInfo.in_flight_rows`.
    """
    if inputs.repeated is None and inputs.counted is None and inputs.bias is None and inputs.allowed is None:
        return logits
    logits = logits.clone()
    # A pair may come twice, where a token in flight is one that was there before: both write the same.
    if inputs.repeated is not None:
        index = _pairs(inputs.repeated, in_flight)
        penalties, found = inputs.repeated.penalties.tensor, logits[index]
        logits[index] = torch.where(found > 0, found / penalties, found * penalties)
    if inputs.counted is not None:
        index = _pairs(inputs.counted, in_flight)
        logits[index] = logits[index] - _penalties(inputs.counted, in_flight)
    if inputs.bias is not None:
        rows, ids, values = (part.tensor for part in inputs.bias)
        logits.index_put_((rows, ids), values, accumulate=True)
    if inputs.allowed is not None:
        rows, ids = (part.tensor for part in inputs.allowed)
        allowed = logits[rows, ids]
        logits[rows] = -torch.inf
        logits[rows, ids] = allowed
    return logits


def _pairs(tokens: Repeated | Counted, in_flight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    known = tokens.known_ids.tensor
    return tokens.rows.tensor, known if in_flight is None else torch.cat((known, in_flight))


def _penalties(counted: Counted, in_flight: torch.Tensor | None) -> torch.Tensor:
    counts = counted.counts.tensor
    if in_flight is not None:
        counts = _count(counted, counts, counted.row_keys.tensor + in_flight)
    return counted.frequency.tensor * counts + counted.presence.tensor * (counts > 0)


def _count(counted: Counted, counts: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Count how often each token was produced, known ones first. keys: int64, row * vocab + id of those in flight."""
    again = (keys[:, None] == keys).sum(dim=1)
    if not counted.known:
        return again.to(counts.dtype)
    known = counted.keys.tensor
    place = torch.searchsorted(known, keys).clamp_(max=counted.known - 1)
    is_known = (known[place] == keys).to(counts.dtype)
    return torch.cat((counts.index_add(0, place, is_known), counts[place] * is_known + again))
