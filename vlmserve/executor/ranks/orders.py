"""What the first rank tells the others to do: one order for each half of a step; and what the last stage answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from vlmserve.executor.model_worker_batch import MMEmbeds, ModelWorkerBatch, ModelWorkerResult, SamplingBatchInfo
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.parallel.group import ProcessGroup
from vlmserve_common.transport.wire import WireCodec, join, split


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsToCome:
    """`MMEmbeds` whose rows [n, width] follow the order, from device to device."""

    token: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOrder:
    """batch: without its embeddings, which follow for the first stage: first those of media, then those in place of
    ids."""

    batch: ModelWorkerBatch
    mm_embeds: tuple[RowsToCome, ...]
    input_embeds: tuple[RowsToCome, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """Of S tokens to sample in a step. token_indices int64 [S]: the batch tokens that they follow. req_pool_indices,
    places int64 [S]: where they are remembered; they follow the order, from device to device."""

    step: int
    token_indices: np.ndarray
    req_pool_indices: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleThereOrder:
    """To the last stage: sample a step, and send what comes of it, a `ModelWorkerResult`."""

    step: int
    info: SamplingBatchInfo


Order: TypeAlias = ForwardOrder | SampleOrder | SampleThereOrder


class OrderCodec:
    """Orders and results as bytes (see `WireCodec`: never pickle)."""

    def __init__(self) -> None:
        self._codec = WireCodec([ForwardOrder, SampleOrder, SampleThereOrder, ModelWorkerResult])

    def encode(self, message: Order | ModelWorkerResult) -> bytes:
        """The bytes of an order or a result."""
        return join(self._codec.encode(message))

    def decode(self, order: bytes) -> Order:
        """The order in some bytes. WireError if there is none."""
        found: Order = self._codec.decode(split(order))
        return found

    def decode_result(self, result: bytes) -> ModelWorkerResult:
        """The result in some bytes. WireError if there is none."""
        found: ModelWorkerResult = self._codec.decode(split(result))
        return found


def to_come(parts: tuple[MMEmbeds, ...]) -> tuple[RowsToCome, ...]:
    """What is said of embeddings that follow."""
    return tuple(
        RowsToCome(token=part.token, shape=tuple(part.embeds.shape), dtype=dtype_name(part.embeds.dtype))
        for part in parts
    )


def receive_rows(
    parts: tuple[RowsToCome, ...], group: ProcessGroup | None, device: torch.device
) -> tuple[MMEmbeds, ...]:
    """The embeddings that follow an order. device: meta for their places alone, where no group hands them on."""
    rows = (torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=device) for part in parts)
    return tuple(
        MMEmbeds(token=part.token, embeds=embeds if group is None else group.broadcast(embeds))
        for part, embeds in zip(parts, rows, strict=True)
    )
