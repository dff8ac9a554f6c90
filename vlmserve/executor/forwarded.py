"""A step between its two halves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vlmserve.executor.logprobs import DeviceLogprobs
from vlmserve_common.compute.transfers import Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Forwarded:
    """A step that is not sampled yet. places: int64 [N] on the host, the number of each of its tokens among those of
    its request. hidden: [N, hidden], of these, or of none where logits come from elsewhere. returned: float32 [H,
    hidden], of those that are to be returned. began, ended: on the device."""

    step: int
    req_pool_indices: np.ndarray
    places: np.ndarray
    hidden: torch.Tensor
    returned: torch.Tensor | None
    prompt_logprobs: DeviceLogprobs | None
    began: Mark
    ended: Mark
