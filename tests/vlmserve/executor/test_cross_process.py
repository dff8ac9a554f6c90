"""`ModelWorkerBatch` really crosses a boundary: a runner in another process runs encoded steps to the same tokens."""

import multiprocessing
from pathlib import Path

import pytest

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from vlmserve import LLM, SamplingOverrides
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.build import build_runner
from vlmserve.engine.step import OneGroup
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, ModelWorkerResult, SamplingBatchInfo
from vlmserve_common.transport.wire import WireCodec

TYPES = [ModelWorkerBatch, SamplingBatchInfo, ModelWorkerResult]
SAMPLING = SamplingOverrides(temperature=0.0, max_new_tokens=8, ignore_eos=True)


def work(pipe, args: EngineArgs) -> None:
    """The other process: decodes a step, runs it, encodes the result."""
    runner, _ = build_runner(args)
    codec = WireCodec(TYPES)
    while (frames := receive(pipe)) is not None:
        forwarded = runner.forward(codec.decode(frames))
        info = codec.decode(receive(pipe))
        send(pipe, codec.encode(runner.sample(forwarded, info).result()))


def send(pipe, frames) -> None:
    pipe.send_bytes(str(len(frames)).encode())
    for frame in frames:
        pipe.send_bytes(bytes(frame))


def receive(pipe):
    try:
        return [pipe.recv_bytes() for _ in range(int(pipe.recv_bytes()))]
    except EOFError:
        return None


class RemoteWorker:
    def __init__(self, args: EngineArgs) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, args))
        self.process.start()
        theirs.close()
        self.codec = WireCodec(TYPES)
        self.steps = 0

    def forward(self, batch: ModelWorkerBatch) -> None:
        send(self.pipe, self.codec.encode(batch))

    def sample(self, forwarded: None, info: SamplingBatchInfo) -> ModelWorkerResult:
        send(self.pipe, self.codec.encode(info))
        frames = receive(self.pipe)
        assert frames is not None, "the worker process is gone"
        self.steps += 1
        return self.codec.decode(frames)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(30)
        assert self.process.exitcode == 0


def test_a_worker_in_another_process_gives_the_same_answers(tmp_path: Path):
    """Told of all tokens, and of those only that it has not made itself."""
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    settings = {"num_threads": 1, "chunked_prefill_size": 32, "page_size": 4, "max_total_tokens": 2048}
    asked = conversations()[:6]
    with LLM(str(folder), **settings) as llm:
        here = llm.chat_batch(asked, SAMPLING, num_logprobs=2)
        remote = RemoteWorker(EngineArgs(model=str(folder), **settings))
        try:
            for worker in (remote, WithoutIds(remote)):
                llm.flush_cache()
                llm.engine.loop.worker = OneGroup(worker)
                steps = remote.steps
                assert_equal(llm.chat_batch(asked, SAMPLING, num_logprobs=2), here)
                assert remote.steps > steps + 8
        finally:
            remote.close()


def assert_equal(there, here):
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.token_ids == ours.token_ids
        for a, b in zip(theirs.logprobs, ours.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert a.top_ids == b.top_ids


class WithoutIds:
    """Names every token that is fed back by its req_pool_idx only, as a scheduler ahead of the device does."""

    def __init__(self, worker: RemoteWorker) -> None:
        self.worker = worker

    def sample(self, forwarded: None, info: SamplingBatchInfo) -> ModelWorkerResult:
        return self.worker.sample(forwarded, info)

    def forward(self, batch: ModelWorkerBatch) -> None:
        from vlmserve.models.attention.base import ForwardMode

        if batch.forward_mode == ForwardMode.DECODE:
            batch.input_ids[:] = -1
        self.worker.forward(batch)
