"""Messages to several replicas: each goes to the right one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from vlmserve.config.engine_args import EngineArgs
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.control_messages import (
    AdapterLoaded,
    ControlRefused,
    ControlRequest,
    ControlResult,
    EngineState,
    FlushCacheReq,
    LoadAdapterReq,
    UnloadAdapterReq,
)
from vlmserve.ipc.engines import Engines, connect
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTextOutput,
    BatchTokenizedGenerateReqInput,
    EncodeOutput,
    EncodeReqInput,
    FinishReason,
    RequestsLost,
    SamplingParams,
    SchedulerInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from vlmserve.ipc.sockets import ControlServer, Receiver
from vlmserve.routing.replicas import ReplicaRouter
from vlmserve_common.checkpoint.adapter_ref import AdapterRef

PATIENCE_S = 20.0


def ask(rid: str, fill: int, **fields: Any) -> TokenizedGenerateReqInput:
    ids = np.full(4096, fill, dtype=np.int64)
    return TokenizedGenerateReqInput(rid=rid, input_ids=ids, sampling_params=SamplingParams(), **fields)


def ended(rid: str) -> BatchTextOutput:
    output = TokenOutput(
        rid=rid,
        text="",
        token_ids=(),
        finish_reason=FinishReason(type="stop"),
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
    )
    return BatchTextOutput(outputs=(output,))


class Replicated:
    """Two schedulers that only receive, and the API process's way to them."""

    def __init__(self, folder: Path) -> None:
        (folder / "shm").mkdir()
        self.channels = Channels.in_directories(folder, folder / "shm").replicas(2)
        self.shared = self.channels[0].shared_arrays(mapped=True)
        types = get_args(SchedulerInput)
        self.receivers = [Receiver(own.scheduler, types, shared=self.shared) for own in self.channels]

    def __enter__(self) -> Replicated:
        return self

    def __exit__(self, *_: object) -> None:
        for receiver in self.receivers:
            receiver.close()

    def got(self, replica: int) -> Any:
        return self.receivers[replica].recv(PATIENCE_S)

    def run(self, scenario: Any) -> None:
        async def main() -> None:
            async with AsyncExitStack() as stack:
                await scenario(connect(self.channels, EngineArgs(model="m", dp_size=2), stack))

        asyncio.run(main())


@pytest.fixture
def replicas(tmp_path: Path) -> Any:
    with Replicated(tmp_path) as made:
        yield made


def test_what_is_about_a_request_follows_it(replicas: Replicated):
    async def scenario(engines: Engines) -> None:
        engines.send(ask("a", 1))
        engines.prepare(ask("b", 2)).send()
        engines.send(AbortReq(rid="b"))
        engines.send(AbortReq(rid="a"))
        engines.send(AbortReq(rid="nobody"))
        engines.send(EncodeReqInput(rid="ahead", items=()))
        engines.came(EncodeOutput(rid="ahead", items=()))
        engines.send(AbortReq(rid="ahead"))
        for replica in range(2):
            engines.send(replace(ask("end", 1), data_parallel_rank=replica))
        assert [replicas.got(0).rid for _ in range(3)] == ["a", "a", "ahead"]
        assert [replicas.got(1).rid for _ in range(2)] == ["b", "b"]
        assert [replicas.got(n).rid for n in range(2)] == ["end", "end"], "and nothing before it"

    replicas.run(scenario)
    assert replicas.shared.outstanding() == 0


def test_where_a_message_with_arrays_goes_is_decided_as_it_leaves(replicas: Replicated):
    async def scenario(engines: Engines) -> None:
        late = engines.prepare(ask("late", 1))
        engines.prepare(ask("dropped", 9)).discard()
        engines.send(ask("a", 3))
        late.send()
        message = replicas.got(1)
        assert message.rid == "late"
        assert (message.input_ids == 1).all(), "its arrays are found by whichever replica"
        engines.came(ended("a"))
        engines.came(RequestsLost(rids=("late",), message="lost"))
        engines.send(ask("b", 5))
        assert [replicas.got(0).rid for _ in range(2)] == ["a", "b"], "nothing is in flight: their turn"

    replicas.run(scenario)
    assert replicas.shared.outstanding() == 0


def test_prompts_of_one_message_are_spread_and_copies_of_one_are_not(replicas: Replicated):
    async def scenario(engines: Engines) -> None:
        requests = [ask(f"{fill}-{n}", fill, group=str(fill)) for fill in (1, 2) for n in range(2)]
        engines.send(BatchTokenizedGenerateReqInput(requests=tuple(requests)))
        for replica, rids in enumerate((["1-0", "1-1"], ["2-0", "2-1"])):
            assert [one.rid for one in replicas.got(replica).requests] == rids

    replicas.run(scenario)


def test_operators_reach_all(replicas: Replicated):
    servers = [ControlServer(own.control) for own in replicas.channels]

    def flush(tokens: int) -> ControlResult:
        return EngineState(paused=False, flushed=tokens, num_running_reqs=0, num_waiting_reqs=0)

    async def scenario(engines: Engines) -> None:
        engines.send(ask("a", 1, data_parallel_rank=1))
        engines.came(ended("a"))
        asked = asyncio.ensure_future(engines.ask(FlushCacheReq()))
        for number, server in enumerate(servers):
            while not server.socket.poll(0):
                await asyncio.sleep(0)
            server.answer_all(lambda _, number=number: flush(number + 3))
        assert await asked == flush(7)
        engines.send(ask("b", 1))
        assert replicas.got(0).rid == "b", "what was flushed draws nobody"

    try:
        replicas.run(scenario)
    finally:
        for server in servers:
            server.close()


class Adapting:
    """The control channel of a replica that answers the loading of an adapter. asked: everything that it was asked."""

    def __init__(self, answer: ControlResult) -> None:
        self.answer, self.asked = answer, list[ControlRequest]()

    async def ask(self, question: ControlRequest) -> ControlResult:
        self.asked.append(question)
        idle = EngineState(paused=False, num_running_reqs=0, num_waiting_reqs=0)
        return self.answer if isinstance(question, LoadAdapterReq) else idle


def test_an_adapter_that_one_replica_refuses_is_at_none() -> None:
    def loaded(digest: str, *, is_new: bool = True) -> AdapterLoaded:
        return AdapterLoaded(adapter=AdapterRef(digest=digest, path="/a", tower=False), is_new=is_new)

    def ask(*answers: ControlResult) -> tuple[ControlResult, list[list[ControlRequest]]]:
        replicas = [Adapting(answer) for answer in answers]
        engines = Engines([], replicas, ReplicaRouter(len(replicas)))  # type: ignore[arg-type]
        answer = asyncio.run(engines.ask(LoadAdapterReq(path="/a")))
        return answer, [one.asked[1:] for one in replicas]

    forget = [UnloadAdapterReq(digest="x")]
    assert ask(loaded("x"), loaded("x")) == (loaded("x"), [[], []])
    answer, further = ask(loaded("x"), ControlRefused(message="no", status=400), loaded("x", is_new=False))
    assert isinstance(answer, ControlRefused)
    assert answer.message == "replica 1: no"
    assert further == [forget, [], []], "the third one has it by another name"
    answer, further = ask(loaded("x"), loaded("y"))
    assert isinstance(answer, ControlRefused)
    assert "changed while replicas read it" in answer.message
    assert further == [forget, [UnloadAdapterReq(digest="y")]]
