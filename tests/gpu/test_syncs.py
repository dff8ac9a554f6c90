"""The scheduler never waits for the GPU but for a step's results, by an event: everything else only launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.test_answers import engine
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import ask, picture
from vlmserve import LLM
from vlmserve.messages import SamplingParams, TokenizedGenerateReqInput
from vlmserve.tokenizer.request_builder import ChatPrompt, GenerateReqInput

KINDS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=60),
    "sampled": SamplingParams(temperature=0.8, ignore_eos=True, max_new_tokens=60),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.02, ignore_eos=True, max_new_tokens=60),
    "penalties": SamplingParams(
        temperature=0.0, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1, ignore_eos=True,
        max_new_tokens=60,
    ),
    "bias": SamplingParams(temperature=0.0, logit_bias={50: 1.0}, min_tokens=40, max_new_tokens=60),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[LLM]:
    folder = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("tiny"), dtype="bfloat16")
    with engine(folder, device, disable_radix_cache=True) as made:
        yield made


@contextmanager
def nothing_waits() -> Iterator[None]:
    """RuntimeError by whatever waits for the GPU, other than for an event."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def messages(llm: LLM, sampling: SamplingParams, count: int, logprobs: int | None) -> list[TokenizedGenerateReqInput]:
    made = []
    for number in range(count):
        prompt = ChatPrompt(messages=ask(picture(number, 96, 64), f"What is this? {number}"))
        [message], _, _ = llm._build(GenerateReqInput(request_id="", prompt=prompt))
        made.append(
            TokenizedGenerateReqInput(
                rid=f"r{number}",
                input_ids=message.input_ids,
                mm_inputs=message.mm_inputs,
                sampling_params=sampling,
                num_logprobs=logprobs,
            )
        )
    return made


def run(llm: LLM, sampling: SamplingParams, logprobs: int | None) -> dict[str, list[int]]:
    """Answers of several requests. Their decode steps wait for nothing, once the first few are done."""
    scheduler, answers = llm.engine.scheduler, {}

    def take(output) -> None:
        for one in output.outputs:
            assert one.finish_reason is None or one.finish_reason.type in ("length", "stop"), one.finish_reason
            answers.setdefault(one.rid, []).extend(one.token_ids)

    scheduler._send = take
    for message in messages(llm, sampling, 5, logprobs):
        scheduler.handle(message)
    while min(map(len, answers.values()), default=0) < 4 or len(answers) < 5:
        scheduler.step_or_wait()
    with nothing_waits():
        while min(map(len, answers.values())) < 40:
            scheduler.step()
    while not scheduler.is_idle():
        scheduler.step_or_wait()
    return answers


@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize("kind", list(KINDS))
def test_decode_steps_wait_for_nothing(llm, cuda, kind, logprobs):
    answers = run(llm, KINDS[kind], logprobs)
    assert all(len(answer) >= 40 for answer in answers.values())


def test_prompts_with_pictures_wait_for_nothing(llm, cuda):
    """The second time: what is allocated and compiled once is there."""
    scheduler = llm.engine.scheduler
    scheduler._send = lambda output: None
    for turn in range(2):
        asked = messages(llm, KINDS["greedy"], 3, None)
        with nothing_waits() if turn else torch.inference_mode():
            for message in asked:
                scheduler.handle(message)
            for _ in range(20):
                scheduler.step()
        while not scheduler.is_idle():
            scheduler.step_or_wait()


def test_what_waits_is_seen(cuda):
    with pytest.raises(RuntimeError, match="synchroniz"), nothing_waits():
        torch.ones(1, device=cuda).item()
