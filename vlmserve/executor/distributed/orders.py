"""The orders of the first rank to all other ranks, one for each half of a step, and the last stage's answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

import numpy as np
import torch

from vlmserve.executor.adapter_order import AdapterOrder
from vlmserve.executor.model_worker_batch import MMEmbeds, ModelWorkerBatch, ModelWorkerResult, SamplingBatchInfo
from vlmserve.executor.profile_order import ProfileOrder
from vlmserve.ipc.weight_messages import WeightsOrder
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.parallel.group import ProcessGroup
from vlmserve_common.transport.wire import WireCodec, join, split


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsToCome:
    """`MMEmbeds` without the rows [n, width], which follow the order from device to device."""

    token: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOrder:
    """Compute a step. batch: without embeddings. These follow for the first stage: media first, then those given in
    place of token ids."""

    batch: ModelWorkerBatch
    mm_embeds: tuple[RowsToCome, ...]
    input_embeds: tuple[RowsToCome, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """Help to sample S tokens of a step. token_indices int64 [S]: the batch tokens that they follow. req_pool_indices,
    places int64 [S]: where to remember the tokens. The tokens themselves follow this order from device to device."""

    step: int
    token_indices: np.ndarray
    req_pool_indices: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleThereOrder:
    """To the last stage: sample a step and send back a `ModelWorkerResult`."""

    step: int
    info: SamplingBatchInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardRound:
    """Compute one step of each attention group; None for a group without one, which joins the other groups'
    collectives. Embeddings follow in the order of the groups."""

    steps: tuple[ForwardOrder | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRound:
    """Help to sample one step of each attention group; None for a group without one. Tokens follow in the order of the
    groups."""

    steps: tuple[SampleOrder | None, ...]


BesidesOrder: TypeAlias = ProfileOrder | WeightsOrder | AdapterOrder
"""An order to do something else than to compute."""
Order: TypeAlias = ForwardOrder | SampleOrder | SampleThereOrder | BesidesOrder
Round: TypeAlias = ForwardRound | SampleRound | BesidesOrder
BESIDES_ORDERS = get_args(BesidesOrder)


class OrderCodec:
    """Turns orders and results into bytes and back (see `WireCodec`: never pickle)."""

    def __init__(self) -> None:
        self._codec = WireCodec([*get_args(Order), ForwardRound, SampleRound, ModelWorkerResult])

    def encode(self, message: Order | Round | ModelWorkerResult) -> bytes:
        """Return the bytes of an order or a result."""
        return join(self._codec.encode(message))

    def decode(self, received: bytes) -> Any:
        """Return the order or result in some bytes. WireError if there is none."""
        return self._codec.decode(split(received))


def forward_order(batch: ModelWorkerBatch) -> ForwardOrder:
    """Make the order to compute a step whose embeddings follow."""
    return ForwardOrder(
        batch=replace(batch, mm_embeds=(), input_embeds=()),
        mm_embeds=_to_come(batch.mm_embeds),
        input_embeds=_to_come(batch.input_embeds),
    )


def with_rows(order: ForwardOrder, group: ProcessGroup | None, device: torch.device) -> ModelWorkerBatch:
    """Receive the embeddings that follow an order, and return its step with them. Without a group, only their places
    are known; the device is then meta."""
    return replace(
        order.batch,
        mm_embeds=_receive(order.mm_embeds, group, device),
        input_embeds=_receive(order.input_embeds, group, device),
    )


def _to_come(parts: tuple[MMEmbeds, ...]) -> tuple[RowsToCome, ...]:
    return tuple(
        RowsToCome(token=part.token, shape=tuple(part.embeds.shape), dtype=dtype_name(part.embeds.dtype))
        for part in parts
    )


def _receive(parts: tuple[RowsToCome, ...], group: ProcessGroup | None, device: torch.device) -> tuple[MMEmbeds, ...]:
    rows = (torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=device) for part in parts)
    return tuple(
        MMEmbeds(token=part.token, embeds=embeds if group is None else group.broadcast(embeds))
        for part, embeds in zip(parts, rows, strict=True)
    )
