"""A step that has been launched on the device: between its halves, its result, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vlmserve.executor.logprobs import DeviceLogprobs
from vlmserve.executor.model_worker_batch import ModelWorkerResult, RowLogprobs
from vlmserve.executor.sampler import SamplerOutput
from vlmserve_common.compute.transfers import Mark, Transfers
from vlmserve_common.errors import DeviceLostError, EngineError, first_line

# Raised since torch 2.8 for what CUDA reports; before, it is a plain RuntimeError.
_REPORTED: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)
_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_FLOATS = np.zeros(0, dtype=np.float32)


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Raise EngineError where the GPU's memory is too small for `what`, and DeviceLostError for any other error that it
    reports. Such an error may come from work that was launched earlier."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"{what} needs more GPU memory than is left ({first_line(error)}): lower --mem-fraction-static, "
            "--chunked-prefill-size or --max-running-requests"
        ) from error
    except _REPORTED as error:
        if "CUDA" not in str(error):
            raise
        raise DeviceLostError(
            f"the GPU failed at {what}, or at what was launched before it, and has to be started anew: "
            f"{first_line(error)} (the environment variable CUDA_LAUNCH_BLOCKING=1 shows where)"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Forwarded:
    """A step that has been computed and not sampled.

    places: int64 [N] on the host, the place of each token in its request. hidden: [N, hidden], or no rows where logits
    come from elsewhere. returned: float32 [H, hidden], hidden states that the request asked for. drafts: int64, guesses
    made here, see `ModelWorkerResult`. began, ended: marks on the device.
    """

    step: int
    req_pool_indices: np.ndarray
    places: np.ndarray
    hidden: torch.Tensor
    returned: torch.Tensor | None
    prompt_logprobs: DeviceLogprobs | None
    began: Mark
    ended: Mark
    drafts: torch.Tensor | None = None


class LaunchedResult:
    """A step's results on their way to the host, in one copy.

    out: None where the step samples nothing. began: when sampling began.
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
        if forwarded.drafts is not None:
            parts["drafts"] = (forwarded.drafts,)
        self._counts = {name: len(tensors) for name, tensors in parts.items()}
        self._download = transfers.download([tensor for tensors in parts.values() for tensor in tensors])

    def result(self) -> ModelWorkerResult:
        """Wait for the result. To be called once."""
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
            drafts=parts["drafts"][0] if "drafts" in parts else None,
            failures=self._failures,
        )


def _spread(found: RowLogprobs | None, wanted: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spread logprobs, and the likeliest ids with theirs, over all rows. Rows that did not ask get NaN and 0."""
    width = 0 if found is None else found.top_ids.shape[1]
    logprobs = np.full(rows, np.nan, dtype=np.float32)
    top_ids = np.zeros((rows, width), dtype=np.int64)
    top_logprobs = np.full((rows, width), np.nan, dtype=np.float32)
    if found is not None:
        logprobs[wanted], top_ids[wanted], top_logprobs[wanted] = found.logprobs, found.top_ids, found.top_logprobs
    return logprobs, top_ids, top_logprobs
