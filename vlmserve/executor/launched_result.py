"""What a step brings, on its way from the device to the scheduler."""

from __future__ import annotations

import numpy as np
import torch

from vlmserve.executor.device_errors import device_errors
from vlmserve.executor.forwarded import Forwarded
from vlmserve.executor.logprobs import DeviceLogprobs
from vlmserve.executor.model_worker_batch import ModelWorkerResult, RowLogprobs
from vlmserve.executor.sampler import SamplerOutput
from vlmserve_common.compute.transfers import Mark, Transfers

_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_FLOATS = np.zeros(0, dtype=np.float32)


class LaunchedResult:
    """All of a step's results in one copy, which `result` waits for.

    out: None where the step samples nothing. began: when its sampling did.
    """

    def __init__(self, forwarded: Forwarded, out: SamplerOutput | None, began: Mark, transfers: Transfers) -> None:
        self._step = forwarded.step
        self._marks = forwarded.began, forwarded.ended, began
        self._wanted = _NO_IDS if out is None else out.wanted
        self._failures = () if out is None else out.failures
        parts: dict[str, tuple[torch.Tensor, ...]] = {}
        if out is not None:
            parts["tokens"] = (out.next_token_ids,)
        if out is not None and out.logprobs is not None:
            parts["logprobs"] = out.logprobs.tensors()
        if forwarded.prompt_logprobs is not None:
            parts["prompt"] = forwarded.prompt_logprobs.tensors()
        if forwarded.returned is not None:
            parts["returned"] = (forwarded.returned,)
        self._counts = {name: len(tensors) for name, tensors in parts.items()}
        self._download = transfers.download([tensor for tensors in parts.values() for tensor in tensors])

    def result(self) -> ModelWorkerResult:
        """See `PendingResult`. To be called once."""
        with device_errors(f"step {self._step}"):
            arrays = iter(self._download.arrays())
        parts = {name: [next(arrays) for _ in range(count)] for name, count in self._counts.items()}
        began, ended, sampling = self._marks
        tokens = parts["tokens"][0] if "tokens" in parts else _NO_IDS
        found = DeviceLogprobs.on_host(parts["logprobs"]) if "logprobs" in parts else None
        logprobs, top_ids, top_logprobs = _spread(found, self._wanted, len(tokens))
        return ModelWorkerResult(
            step=self._step,
            compute_s=ended.seconds_since(began) + self._download.mark.seconds_since(sampling),
            next_token_ids=tokens,
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            asked_logprobs=_NO_FLOATS if found is None else found.asked,
            prompt_logprobs=DeviceLogprobs.on_host(parts["prompt"]) if "prompt" in parts else None,
            hidden_states=parts["returned"][0] if "returned" in parts else None,
            failures=self._failures,
        )


def _spread(found: RowLogprobs | None, wanted: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logprobs, and ids and logprobs of the likeliest, of all rows: those that did not ask have none."""
    width = 0 if found is None else found.top_ids.shape[1]
    logprobs = np.full(rows, np.nan, dtype=np.float32)
    top_ids = np.zeros((rows, width), dtype=np.int64)
    top_logprobs = np.full((rows, width), np.nan, dtype=np.float32)
    if found is not None:
        logprobs[wanted], top_ids[wanted], top_logprobs[wanted] = found.logprobs, found.top_ids, found.top_logprobs
    return logprobs, top_ids, top_logprobs
