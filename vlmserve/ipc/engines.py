"""The API process's way to the engine, or to those of several replicas: each message to the right one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol, get_args

from vlmserve.config.engine_args import EngineArgs
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.control import ControlClient
from vlmserve.ipc.control_messages import ControlRequest, ControlResult, FlushCacheReq
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTextOutput,
    BatchTokenizedGenerateReqInput,
    EncodeOutput,
    EncodeReqInput,
    GetStatsReq,
    PreparedMessage,
    RequestsLost,
    SchedulerInput,
    TokenizedGenerateReqInput,
    TokenizerManagerInput,
)
from vlmserve.ipc.replica_sums import sum_results
from vlmserve.ipc.routing import Demand, ReplicaRouter, demand_of, demands
from vlmserve.ipc.sockets import Prepared, Sender
from vlmserve_common.transport.shm import SPARE_BYTES

_LINGER_MS = 200


class Engines(Protocol):
    """send, prepare: as of a `Sender`. ask: as of a `ControlClient`. came: a message from the engine was taken."""

    def send(self, message: SchedulerInput) -> None: ...

    def prepare(self, message: SchedulerInput) -> PreparedMessage: ...

    async def ask(self, question: ControlRequest) -> ControlResult: ...

    def came(self, message: TokenizerManagerInput) -> None: ...


def connect(channels: Sequence[Channels], args: EngineArgs, stack: AsyncExitStack) -> Engines:
    """To each replica; `stack` closes what that takes. Call it in the running event loop."""
    shared = channels[0].shared_arrays(spare_bytes=SPARE_BYTES)
    senders, operators = [], []
    for own in channels:
        senders.append(Sender(own.scheduler, get_args(SchedulerInput), shared=shared, linger_ms=_LINGER_MS))
        stack.callback(senders[-1].close)
        operators.append(ControlClient(own.control))
        stack.callback(operators[-1].close)
    if len(channels) == 1:
        return OneEngine(senders[0], operators[0])
    return Replicas(senders, operators, ReplicaRouter(len(senders), method=args.load_balance_method))


class OneEngine:
    """There is nothing to choose."""

    def __init__(self, sender: Sender, operator: ControlClient) -> None:
        self.send = sender.send
        self.prepare = sender.prepare
        self.ask = operator.ask

    def came(self, message: TokenizerManagerInput) -> None:
        """See `Engines`."""


class Replicas:
    """Each request goes where `router` says, what is about it follows, and what is about the engine goes to all."""

    def __init__(self, senders: Sequence[Sender], operators: Sequence[ControlClient], router: ReplicaRouter) -> None:
        self._senders = senders
        self._operators = operators
        self._router = router

    def send(self, message: SchedulerInput) -> None:
        """See `Sender.send`."""
        match message:
            case AbortReq():
                replica = self._router.replica_of(message.rid)
                self._router.end(message.rid)
                if replica is not None:
                    self._senders[replica].send(message)
            case GetStatsReq():
                for sender in self._senders:
                    sender.send(message)
            case _:
                for part, demand in demands(message):
                    self._senders[self._router.place(demand)].send(part)

    def prepare(self, message: SchedulerInput) -> PreparedMessage:
        """See `Sender.prepare`. Where it goes is decided as it is sent. It goes as a whole: what it has in common with
        others of its message was copied once."""
        assert isinstance(message, TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | EncodeReqInput)
        if isinstance(message, BatchTokenizedGenerateReqInput):
            demand = demand_of(message.requests)
        else:
            ((_, demand),) = demands(message)
        return _Placed(self._senders[0].prepare(message), demand, self._router, self._senders)

    async def ask(self, question: ControlRequest) -> ControlResult:
        """See `ControlClient.ask`; the answer of all, which comes with the last one's."""
        if isinstance(question, FlushCacheReq):
            self._router.forget()
        return sum_results(await asyncio.gather(*(operator.ask(question) for operator in self._operators)))

    def came(self, message: TokenizerManagerInput) -> None:
        """See `Engines`."""
        match message:
            case BatchTextOutput():
                for output in message.outputs:
                    if output.finish_reason is not None:
                        self._router.end(output.rid)
            case EncodeOutput():
                self._router.end(message.rid)
            case RequestsLost():
                for rid in message.rids:
                    self._router.end(rid)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A message with arrays that finds its replica when it is sent."""

    prepared: Prepared
    demand: Demand
    router: ReplicaRouter
    senders: Sequence[Sender]

    def send(self) -> None:
        self.prepared.send(self.senders[self.router.place(self.demand)])

    def discard(self) -> None:
        self.prepared.discard()
