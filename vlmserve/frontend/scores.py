"""How likely some answers are, from the logprobs of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vlmserve.ipc.messages import PromptLogprobs
from vlmserve_common.errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelScore:
    """The score of one label. token_ids, logprobs: the label's tokens, each after the prompt and the tokens before it.
    logprob: their sum. probability: of this label if the answer must be one of the labels asked about."""

    label: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprob: float
    probability: float


def label_scores(labels: Sequence[str], found: Sequence[PromptLogprobs | None]) -> list[LabelScore]:
    """Score each label. found: the logprobs of each label's tokens."""
    rows = [_logprobs(one) for one in found]
    sums = [math.fsum(logprobs) for _, logprobs in rows]
    return [
        LabelScore(label=label, token_ids=ids, logprobs=logprobs, logprob=total, probability=share)
        for label, (ids, logprobs), total, share in zip(labels, rows, sums, softmax(sums), strict=True)
    ]


def softmax(logprobs: Sequence[float]) -> list[float]:
    """Turn logprobs into probabilities that sum to 1."""
    best = max(logprobs)
    if best == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    return [weight / math.fsum(weights) for weight in weights]


def _logprobs(found: PromptLogprobs | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if found is None:
        raise EngineError("a label was not scored")
    return tuple(found.token_ids.tolist()), tuple(found.logprobs.tolist())
