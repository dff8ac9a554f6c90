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
from vlmserve.executor.logprobs import DeviceLogprobs, row_logprobs
from vlmserve.executor.model_worker_batch import SamplingBatchInfo
from vlmserve.executor.penalties import adjust
from vlmserve.executor.sampler_inputs import RandomRows, SamplerInputs
from vlmserve_common.compute.transfers import Upload, transfers_for
from vlmserve_common.kernels.rows import argmax


@dataclass(frozen=True)
class SamplerOutput:
    """next_token_ids: int64 [S], on the device. wanted: int64 [W], those of the S that logprobs are asked of, on the
    host; logprobs: of these, on the device. failures: as in `ModelWorkerResult`."""

    next_token_ids: torch.Tensor
    wanted: np.ndarray
    logprobs: DeviceLogprobs | None
    failures: tuple[tuple[int, str], ...] = ()


def sample(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    processors: LogitsProcessors | None = None,
    *,
    inputs: SamplerInputs | None = None,
    in_flight: torch.Tensor | None = None,
) -> SamplerOutput:
    """logits float32 [S, vocab], which may be written to -> one token each. Reported logprobs are of the logits as the
    model gave them. Grammars come last: what they forbid nothing can allow.

    Waits for nothing on a GPU, unless there are logits processors, which are free to.
    processors: applied behind penalties and bias. inputs: of `info`, if that is on the device already. in_flight: ids
    of the tokens of `info.in_flight_rows`.
    """
    inputs = inputs or _sent(info, logits)
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


def _sent(info: SamplingBatchInfo, logits: torch.Tensor) -> SamplerInputs:
    upload = Upload(transfers_for(logits.device))
    inputs = SamplerInputs(info, logits.shape[1], upload)
    upload.send()
    return inputs


def _mask(logits: torch.Tensor, rows: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """Set logits to -inf, in place, of tokens that a grammar does not allow; returns the likeliest token of each row.

    rows: int64 [G], those with a grammar. forbidden: bool [G, vocab].
    Where all that a grammar allows was ruled out before (the end of an answer, by `min_tokens`), its tokens are alike.
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
    """int32 [G, words] -> bool [G, vocab]: where a bit is 0. On a CPU by numpy: torch takes ten times as long there,
    as does xgrammar's own operator, which starts threads."""
    vocab = logits.shape[1]
    if logits.is_cpu:
        bits = bitmasks.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(bits, axis=1, count=vocab, bitorder="little") == 0)
    return _unpacked_zeros(bitmasks, vocab)


def _unpacked_zeros(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Of int32 [G, words], on their device, to which the bits themselves would take eight times as long."""
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
