"""Chooses the tokens of a clip that change most, by the measure of EVS (Efficient Video Sampling, arXiv:2510.14624).

A token is compared with the one at the same place in the temporal patch before: 1 less the cosine of their embeddings.
How many a temporal patch keeps is known before it is encoded (`processors.pruning.kept_counts`), so prompts have their
length, and each temporal patch can be used as soon as it and the one before are there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F


def most_changed(embeds: torch.Tensor, before: torch.Tensor, count: int) -> np.ndarray:
    """Return the numbers of the `count` embeddings that differ most from `before`, ascending: int64 [count].

    `embeds`, `before`: [n, width], of two temporal patches. Among equals, the first ones are chosen.
    """
    change = 1 - F.cosine_similarity(embeds.float(), before.float(), dim=1)
    return change.argsort(descending=True, stable=True)[:count].sort().values.cpu().numpy()
