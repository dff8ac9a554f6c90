"""What a step asks of a GPU, counted on one that is not there: copies, what waits, and launches beside the model's.

The answers have to be those of the CPU nevertheless, though results land late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.fake_cuda.engine import move_engine
from tests.fake_cuda.tensors import CUDA, Counts, CudaTensor, FakeCuda
from tests.tiny_checkpoints import HYBRID, make_checkpoint
from tests.vlmserve import reference
from tests.vlmserve.executor import test_sampler
from tests.vlmserve.executor.test_sampler import info
from tests.vlmserve.reference import conversations
from vision.towers import attention
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine.step import OneGroup
from vlmserve.executor.model_worker_batch import SamplingBatchInfo
from vlmserve.executor.sampler import sample
from vlmserve.executor.sampler_inputs import SamplerInputs
from vlmserve.ipc.messages import ReturnOptions
from vlmserve.models.attention.base import ForwardMode
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve_common.compute.transfers import PackedTransfers, Upload

NEW = 6
SETTINGS = {"num_threads": 1, "max_total_tokens": 4096, "cpu_kernels": "off", "enable_return_hidden_states": True}
WAYS: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 7},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "sampled and penalised": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 3, "seed": 9},
    "logprobs": {"temperature": 0.0},
    "prompt logprobs": {"temperature": 0.0},
}


LAUNCHES = {
    "greedy": 6,
    "sampled": 75,
    "penalised": 36,
    "sampled and penalised": 84,
    "logprobs": 17,
    "prompt logprobs": 7,
}
"""Of a decode step, beside the model: the request table, tokens in flight, sampling, results."""
UPLOADED = {"greedy": 108, "sampled": 152}
"""Bytes of a decode step for each of its requests, where these do not depend on its tokens so far."""
ALIGNMENT = 21 * 15


@dataclass
class Step:
    """mode, requests, in_flight, pictures: of its batch. counts: but for what the model itself does."""

    mode: int
    requests: int
    in_flight: bool
    pictures: bool
    counts: Counts


class Watched:
    """Counts what each step of a runner asks for, beside its model."""

    def __init__(self, runner, cuda: FakeCuda) -> None:
        self.runner, self.cuda = runner, cuda
        self.steps: list[Step] = []
        self.model = Counts()
        for name in ("forward", "compute_logits", "embed_tokens"):
            self.set_aside(runner.model, name)
        self.set_aside(runner.attn_backend, "init_forward_metadata")  # of this one

    def set_aside(self, owner, name: str) -> None:
        run = getattr(owner, name)

        def apart(*args, **kwargs):
            before, self.cuda.counts = self.cuda.counts, self.model
            try:
                return run(*args, **kwargs)
            finally:
                self.cuda.counts = before

        object.__setattr__(owner, name, apart)

    def forward(self, batch):
        with self.cuda.counting() as counts:
            forwarded = self.runner.forward(batch)
        in_flight = bool((batch.input_ids < 0).any())
        self.steps.append(
            Step(batch.forward_mode, len(batch.req_pool_indices), in_flight, bool(batch.mm_embeds), counts)
        )
        return forwarded, counts

    def sample(self, forwarded, info):
        before, self.cuda.counts = self.cuda.counts, forwarded[1]
        try:
            return self.runner.sample(forwarded[0], info)
        finally:
            self.cuda.counts = before


def ask(llm: LLM, way: str) -> list:
    options = {"num_logprobs": 3} if way == "logprobs" else {}
    if way == "prompt logprobs":
        options["returns"] = ReturnOptions(prompt_logprobs=2, hidden_states="last")
    sampling = SamplingOverrides(max_new_tokens=NEW, ignore_eos=True, **WAYS[way])
    return llm.chat_batch(conversations()[:4], sampling, **options)


@contextmanager
def engine(folder) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wanted(folder) -> dict[str, list]:
    with engine(folder) as llm:
        return {way: ask(llm, way) for way in WAYS}


@pytest.fixture(scope="module")
def watched(folder) -> Iterator[tuple[LLM, Watched]]:
    with engine(folder) as llm, FakeCuda() as cuda, pytest.MonkeyPatch.context() as patch:
        # this GPU has no kernels of Triton's, and the trial of these waits: on a real one before the first step
        patch.setattr(attention, "gpu_kernels_work", lambda device, dtype, dim: False)
        watched = Watched(move_engine(llm, cuda), cuda)
        llm.engine.loop.worker = OneGroup(watched)
        yield llm, watched


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_the_cpu_and_no_step_waits(way, wanted, watched):
    llm, runner = watched
    llm.flush_cache()
    runner.steps.clear()
    got = ask(llm, way)
    for ours, theirs in zip(got, wanted[way], strict=True):
        assert ours.token_ids == theirs.token_ids
        if theirs.logprobs is not None:
            for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert a.top_ids == b.top_ids
        if theirs.prompt_logprobs is not None:
            np.testing.assert_allclose(ours.prompt_logprobs.logprobs, theirs.prompt_logprobs.logprobs, atol=1e-4)
            assert ours.hidden_states == pytest.approx(theirs.hidden_states, abs=1e-4)
    assert any(step.pictures for step in runner.steps)
    assert sum(step.in_flight for step in runner.steps) >= NEW - 2, "steps are launched ahead of their tokens"
    for step in runner.steps:
        assert not step.counts.syncs
        assert step.counts.uploads <= 2
        assert step.counts.downloads <= 1
    assert not runner.model.syncs
    assert not runner.cuda.counts.syncs, "the encoder, and what is beside steps"
    for step in runner.steps:
        if step.mode == ForwardMode.DECODE:
            assert sum(step.counts.launches.values()) <= LAUNCHES[way], step.counts.launches
        if step.mode == ForwardMode.DECODE and way in UPLOADED:
            assert step.counts.upload_bytes <= UPLOADED[way] * step.requests + ALIGNMENT
            assert step.counts.download_bytes == 8 * step.requests


def test_a_prompt_with_a_picture(watched):
    llm, runner = watched
    llm.flush_cache()
    runner.steps.clear()
    ask(llm, "greedy")
    [first, *_] = [step for step in runner.steps if step.pictures]
    assert sum(first.counts.launches.values()) <= 12, first.counts.launches
    assert (first.counts.uploads, first.counts.downloads) == (2, 1)
    assert llm.engine.loop.encoder._backend._lane.handed_over > 0, "rows are made in a lane of their own"


def test_a_backend_that_waits_is_seen(watched):
    llm, runner = watched
    good, runner.runner.attn_backend = runner.runner.attn_backend, TorchAttentionBackend()
    runner.steps.clear()
    try:
        ask(llm, "greedy")
    finally:
        runner.runner.attn_backend = good
    assert all(step.counts.syncs["copy to the host"] == 1 for step in runner.steps)


def test_no_step_of_a_hybrid_model_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "gpu_kernels_work", lambda device, dtype, dim: False)
    folder = make_checkpoint(HYBRID, tmp_path / "model")
    greedy = SamplingOverrides(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    long = "How many red circles are there on the left side of the blue square? " * 4
    asked = [reference.ask(long), reference.ask("Hi."), reference.ask(long + "Count.", reference.picture(1, 112, 112))]
    settings = {"num_threads": 1, "max_total_tokens": 4096, "cpu_kernels": "off", "page_size": 16}
    with LLM(str(folder), **settings) as llm:
        wanted = [llm.chat_batch(asked, greedy) for _ in range(2)]
    with LLM(str(folder), **settings) as llm, FakeCuda() as cuda:
        runner = move_engine(llm, cuda)
        syncs = []
        forward = runner.forward

        def counted(batch):
            with cuda.counting() as counts:
                forwarded = forward(batch)
            syncs.append(counts.syncs)
            return forwarded

        monkeypatch.setattr(runner, "forward", counted)
        got = [llm.chat_batch(asked, greedy) for _ in range(2)]
    for ours, theirs in zip(got, wanted, strict=True):
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]
        assert [answer.cached_tokens for answer in ours] == [answer.cached_tokens for answer in theirs]
    assert got[1][0].cached_tokens >= 64
    assert len(syncs) > 10
    assert not any(syncs), syncs


def bitmasks(rows: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(3).integers(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars_wait_for_nothing_either(temperature):
    """Also where all that one allows was ruled out before."""
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    masks = bitmasks(2, 70)
    allowed = np.unpackbits(masks[1].view(np.uint8), count=70, bitorder="little") == 1
    logits[2, torch.from_numpy(allowed)] = -torch.inf
    given = info(3, temperatures=np.full(3, temperature, np.float32), masked_rows=[0, 2], bitmasks=masks)
    want = test_sampler.sample(logits.clone(), given).next_token_ids
    upload_and_sample(FakeCuda(), logits, given, want)


def upload_and_sample(cuda: FakeCuda, logits: torch.Tensor, given: SamplingBatchInfo, want: torch.Tensor) -> None:
    with cuda:
        upload = Upload(PackedTransfers(CUDA, cuda.mark))
        inputs = SamplerInputs(given, logits.shape[1], upload)
        upload.send()
        out = sample(CudaTensor(logits.clone()), given, inputs)
        assert not cuda.counts.syncs
        assert cuda.counts.uploads == 1
    assert torch.equal(out.next_token_ids.inner, want)
