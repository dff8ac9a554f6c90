"""The API process's connection to the engine, or to several replicas: each message goes to the right one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import get_args

from vlmserve.config.engine_args import EngineArgs
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.control_messages import (
    AdapterLoaded,
    ControlRefused,
    ControlRequest,
    ControlResult,
    FlushCacheReq,
    LoadAdapterReq,
    UnloadAdapterReq,
    sum_results,
)
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTextOutput,
    BatchTokenizedGenerateReqInput,
    EncodeOutput,
    EncodeReqInput,
    PreparedMessage,
    RequestsLost,
    SchedulerInput,
    TokenizedGenerateReqInput,
    TokenizerManagerInput,
)
from vlmserve.ipc.routing import demand_of, parts_of
from vlmserve.ipc.sockets import ControlClient, Sender
from vlmserve.ipc.weight_messages import ChangeWeightsReq, ReleaseMemoryReq
from vlmserve.routing.replicas import ReplicaRouter
from vlmserve_common.transport.shm import SPARE_BYTES

_LINGER_MS = 200


def connect(channels: Sequence[Channels], args: EngineArgs, stack: AsyncExitStack) -> Engines:
    """Connect to each replica, in the running event loop. `stack` closes the connections."""
    shared = channels[0].shared_arrays(spare_bytes=SPARE_BYTES)
    senders, operators = [], []
    for own in channels:
        senders.append(Sender(own.scheduler, get_args(SchedulerInput), shared=shared, linger_ms=_LINGER_MS))
        stack.callback(senders[-1].close)
        operators.append(ControlClient(own.control))
        stack.callback(operators[-1].close)
    most = args.max_running_requests
    router = ReplicaRouter(len(senders), method=args.load_balance_method, most_answers=most)
    return Engines(senders, operators, router)


class Engines:
    """The engine, or all replicas, seen from the API process. `router` chooses a replica for each request; later
    messages about it follow. Call `came` for each message taken from an engine."""

    def __init__(self, senders: Sequence[Sender], operators: Sequence[ControlClient], router: ReplicaRouter) -> None:
        self._senders = senders
        self._operators = operators
        self._router = router
        self._is_one = len(senders) == 1

    def send(self, message: SchedulerInput) -> None:
        """Send a message to its replica; see `Sender.send`."""
        if self._is_one:
            self._senders[0].send(message)
            return
        match message:
            case AbortReq():
                replica = self._router.replica_of(message.rid)
                self._router.end(message.rid)
                if replica is not None:
                    self._senders[replica].send(message)
            case _:
                for part in parts_of(message):
                    self._senders[self._router.place(demand_of(part))].send(part)

    def prepare(self, message: SchedulerInput) -> PreparedMessage:
        """Copy out a message's arrays; see `Sender.prepare`. The replica is chosen when the message is sent. The
        message stays whole, because its parts share arrays that are copied once."""
        if self._is_one:
            return self._senders[0].prepare(message)
        assert isinstance(message, TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | EncodeReqInput)
        demand = demand_of(message)
        return self._senders[0].prepare(message, lambda: self._senders[self._router.place(demand)])

    async def ask(self, question: ControlRequest) -> ControlResult:
        """Ask all replicas and return their answers as one; see `ControlClient.ask`."""
        if isinstance(question, FlushCacheReq | ChangeWeightsReq | ReleaseMemoryReq):
            self._router.forget()
        results = await asyncio.gather(*(operator.ask(question) for operator in self._operators))
        answer = sum_results(results)
        if isinstance(question, LoadAdapterReq) and isinstance(answer, ControlRefused):  # nobody has it, then
            for operator, result in zip(self._operators, results, strict=True):
                if isinstance(result, AdapterLoaded) and result.is_new:
                    await operator.ask(UnloadAdapterReq(digest=result.adapter.digest))
        return answer

    def came(self, message: TokenizerManagerInput) -> None:
        """Note which answers have ended."""
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
