"""The whole engine on the device, offline: transformers' answers on the CPU, whatever chunks, caches and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.sync_debug import nothing_waits
from tests.vlmserve.reference import Answer, Reference, assert_equal_answers, conversations
from vlmserve import LLM, SamplingOverrides

NEW = 12
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Asked:
    folder: Path
    conversations: list
    wanted: list[Answer]


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    reference = Reference(folder)
    all_of_them = conversations()
    return Asked(folder, all_of_them, [reference.answer(messages, NEW) for messages in all_of_them])


def engine(folder: Path, device: torch.device, **settings: object) -> LLM:
    # few together: each start captures the decode steps of all sizes up to that
    few = {"num_threads": 1, "max_total_tokens": 8192, "max_running_requests": 16}
    return LLM(str(folder), device=str(device), **(few | settings))


def check(llm: LLM, asked: Asked) -> None:
    for turn in (1, -1):  # again, with warm caches and other batch mates
        answers = llm.chat_batch(asked.conversations[::turn], GREEDY, num_logprobs=2)
        for got, want in zip(answers, asked.wanted[::turn], strict=True):
            assert_equal_answers(got, want, TOLERANCE)
    stats = llm.stats()
    assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
    assert stats.req_pool_free == stats.req_pool_total


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked_prefill_size": 16, "page_size": 1},
        {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
        {"chunked_prefill_size": -1, "disable_radix_cache": True},
        {"chunked_prefill_size": 32, "disable_radix_cache": True},
        {"chunked_prefill_size": 64, "page_size": 1, "encoder_cache_mib": 0, "encoder_host_cache_mib": 0},
        # room for little more than the longest request: eviction and retraction
        {"max_total_tokens": 512, "page_size": 4, "schedule_conservativeness": 0.01},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()) or "defaults",
)
def test_float32_answers_are_those_of_transformers(asked, device, settings):
    with engine(asked.folder, device, dtype="float32", **settings) as llm:
        assert llm.info.device == str(device)
        check(llm, asked)


def first_logits(llm: LLM, conversation: list, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits [vocabulary] of an answer's first token."""
    model, taken = llm.engine.runner.model, []
    compute = model.compute_logits

    def note(hidden: torch.Tensor) -> torch.Tensor:
        taken.append(compute(hidden))
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", note)
        llm.chat(conversation, GREEDY)
    return taken[0][0].float().cpu()


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_logits_are_those_of_the_cpu(asked, device, monkeypatch, dtype, off):
    """Distances as parts of the length of the vector of logits: of text alone, of pictures, of both in turns."""
    with (
        engine(asked.folder, torch.device("cpu"), dtype="float32") as truth,
        engine(asked.folder, device, dtype=dtype) as llm,
    ):
        for conversation in asked.conversations:
            wanted, got = (first_logits(one, conversation, monkeypatch) for one in (truth, llm))
            assert (got - wanted).norm() < off * wanted.norm()


def test_sampling_is_the_same_as_on_the_cpu(asked, device):
    """Noise is a hash of seed, place and token: but for near ties, float32 samples alike everywhere."""
    settings = SamplingOverrides(temperature=1.0, top_p=0.9, top_k=50, max_new_tokens=NEW, ignore_eos=True, seed=7)
    answers = []
    for where in (torch.device("cpu"), device):
        with engine(asked.folder, where, dtype="float32") as llm:
            answers.append([done.token_ids for done in llm.chat_batch(asked.conversations, settings)])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= len(asked.conversations) - 1


WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 7},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_wait_for_nothing(folder, cuda, way):
    """But for the event behind each."""
    asked = conversations()[:6]
    sampling = SamplingOverrides(max_new_tokens=12, ignore_eos=True, **WAYS[way])
    with engine(folder, cuda, dtype="float32") as llm:
        first = llm.chat_batch(asked, sampling, num_logprobs=2)  # builds kernels, and fills torch's allocators
        llm.flush_cache()
        with nothing_waits():
            again = llm.chat_batch(asked, sampling, num_logprobs=2)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
