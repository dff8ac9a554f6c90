"""What the first rank tells the others to do: one order for each half of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vlmserve.executor.model_worker_batch import MMEmbeds, ModelWorkerBatch
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
    """batch: without its embeddings, which follow: first those of media, then those in place of ids."""

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


class OrderCodec:
    """Orders as bytes (see `WireCodec`: never pickle)."""

    def __init__(self) -> None:
        self._codec = WireCodec([ForwardOrder, SampleOrder])

    def encode(self, order: ForwardOrder | SampleOrder) -> bytes:
        """The bytes of an order."""
        return join(self._codec.encode(order))

    def decode(self, order: bytes) -> ForwardOrder | SampleOrder:
        """The order in some bytes. WireError if there is none."""
        found: ForwardOrder | SampleOrder = self._codec.decode(split(order))
        return found


def to_come(parts: tuple[MMEmbeds, ...]) -> tuple[RowsToCome, ...]:
    """What is said of embeddings that follow."""
    return tuple(
        RowsToCome(token=part.token, shape=tuple(part.embeds.shape), dtype=dtype_name(part.embeds.dtype))
        for part in parts
    )


def receive_rows(parts: tuple[RowsToCome, ...], group: ProcessGroup, device: torch.device) -> tuple[MMEmbeds, ...]:
    """The embeddings that follow an order."""
    return tuple(
        MMEmbeds(
            token=part.token,
            embeds=group.broadcast(torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=device)),
        )
        for part in parts
    )
