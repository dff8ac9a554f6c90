"""Penalties and logit bias. Tokens that only the device knows count like all other tokens."""

from __future__ import annotations

import torch

from vlmserve.executor.sampler_inputs import Counted, Repeated, SamplerInputs


def adjust(logits: torch.Tensor, inputs: SamplerInputs, in_flight: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits float32 [S, vocab] with penalties and bias: the given tensor, or a changed copy.

    in_flight: int64, the ids of the tokens of `SamplingBatchInfo.in_flight_rows`.
    """
    if inputs.repeated is None and inputs.counted is None and inputs.bias is None:
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
    return logits


def _pairs(tokens: Repeated | Counted, in_flight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and ids."""
    known = tokens.known_ids.tensor
    return tokens.rows.tensor, known if in_flight is None else torch.cat((known, in_flight))


def _penalties(counted: Counted, in_flight: torch.Tensor | None) -> torch.Tensor:
    """Return the penalty float32 of each pair."""
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
