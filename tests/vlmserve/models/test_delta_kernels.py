"""Whole hybrid models whose delta nets the kernels of a GPU compute, under Triton's interpreter: the answers of torch,
whatever chunks, guesses and captured steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.fake_graphs import CallsAgain
from tests.tiny_checkpoints import HYBRID, STREAMED, make_checkpoint
from tests.vlmserve.executor.captured import capture_steps
from tests.vlmserve.reference import Answer, Reference, ask, assert_equal_answers, picture
from tests.vlmserve_common.kernels.triton_device import DEVICE
from vlmserve import LLM, SamplingOverrides

pytest.importorskip("triton")
if DEVICE.type != "cpu":
    pytest.skip("there is a GPU; tests/gpu/test_hybrid.py is for it", allow_module_level=True)

from vlmserve_common.kernels.gpu import delta_rule

NEW = 8
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
KERNELS: dict[str, Any] = {"num_threads": 1, "cpu_kernels": "off", "gpu_kernels": "triton", "max_total_tokens": 2048}
ASKED = [
    ask("Count."),
    ask("How many red circles are there on the left side? " * 4),
    ask("Red, red, red, red, red, red:", picture(1, 56, 56)),
]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    folder = make_checkpoint(HYBRID, tmp_path_factory.mktemp(HYBRID))
    reference = Reference(folder)
    return folder, [reference.answer(messages, NEW) for messages in ASKED]


def check(llm: LLM, wanted: list[Answer]) -> None:
    with mock.patch.object(delta_rule, "run_few", wraps=delta_rule.run_few) as calls:
        for got, want in zip(llm.chat_batch(ASKED, GREEDY, num_logprobs=2), wanted, strict=True):
            assert_equal_answers(got, want, 1e-3)
    assert calls.called


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 48, "enable_mixed_chunk": True},
        {"chunked_prefill_size": 16, "page_size": 4, "mamba_track_interval": 64},
    ],
    ids=str,
)
def test_answers_are_those_of_transformers(hybrid, settings):
    folder, wanted = hybrid
    with LLM(str(folder), **KERNELS, **settings) as llm:
        check(llm, wanted)
        check(llm, wanted)  # from kept states


def test_captured_steps(hybrid):
    """Steps of three requests are padded."""
    folder, wanted = hybrid
    with LLM(str(folder), **KERNELS) as llm:
        capturer = CallsAgain()
        capture_steps(llm, (4,), capturer)
        check(llm, wanted)
        assert capturer.replayed >= NEW - 1
        states = llm._runner.recurrent_cache.recurrent
        assert not states[0].any()
        assert states[-1].any()


@pytest.mark.slow
def test_guesses_of_which_some_are_right(tmp_path):
    folder = make_checkpoint(HYBRID, tmp_path, mtp=True)
    wanted = Reference(folder).answer(ASKED[1], 3 * NEW)
    guesses = {"speculative_algorithm": "mtp", "speculative_num_draft_tokens": 3}
    with LLM(str(folder), **KERNELS, **guesses) as llm:
        drafter = llm._runner._drafter
        plain = drafter.draft

        def draft(step, inputs, rounds):
            plain(step, inputs, rounds)
            tokens, index = inputs.drafts.tokens.tensor, inputs.drafts.host_lens[0] - wanted.prompt_tokens
            truth = torch.tensor(wanted.token_ids)[index + 1 :][: len(tokens)]
            truth[index % 4 :] += 1  # so many are right
            step.input_ids[tokens] = truth % 448

        with (
            mock.patch.object(drafter, "draft", draft),
            mock.patch.object(delta_rule, "advance", wraps=delta_rule.advance) as advances,
        ):
            got = llm.chat(ASKED[1], replace(GREEDY, max_new_tokens=3 * NEW), num_logprobs=2)
    assert_equal_answers(got, wanted, 1e-3)
    counts = {count for call in advances.call_args_list for count in call.args[3].tolist()}
    assert counts >= {1, 4}, "all wrong, and all right"


@pytest.mark.slow
def test_qwen4_exp(tmp_path):
    folder = make_checkpoint(STREAMED, tmp_path)
    few = replace(GREEDY, max_new_tokens=4)
    with LLM(str(folder), **KERNELS | {"gpu_kernels": "torch"}) as llm:
        wanted = [answer.token_ids for answer in llm.chat_batch(ASKED, few)]
    with LLM(str(folder), **KERNELS, chunked_prefill_size=48) as llm:
        assert [answer.token_ids for answer in llm.chat_batch(ASKED, few)] == wanted
